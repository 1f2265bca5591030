"""Several processes that are one run: finding one another, agreeing, noticing a loss, stopping together."""
