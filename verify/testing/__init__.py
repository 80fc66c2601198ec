"""The test kit: tiny decoders, synthetic attention, hypothesis strategies, and the contract as pytest tests."""
