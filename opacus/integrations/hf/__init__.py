"""The parts of `opacus.integrations.transformers`. Nothing here imports Transformers before it is used."""
