"""What a layer costs in one form or another: counted, measured, predicted, or simulated."""
