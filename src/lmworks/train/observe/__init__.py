"""What is measured of a run while it trains: metrics of each step and layer, validation, needles, samples."""
