"""What watches a run while it trains."""
