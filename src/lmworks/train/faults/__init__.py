"""What goes wrong in a run: steps that are not finite, spikes, silent corruption, failed saves, slow ranks."""
