"""Operations of Beam's forward pass. Knows ``model.config`` and nothing else of the model."""
