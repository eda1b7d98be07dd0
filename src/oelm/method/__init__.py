"""The idea itself: frames for query/key projections, frozen. Needs torch alone."""
