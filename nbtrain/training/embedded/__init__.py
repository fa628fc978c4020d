"""How the embedded model was made: ``python -m nbtrain.training.embedded.make --out FOLDER``."""
