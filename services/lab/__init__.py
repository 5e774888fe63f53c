"""The laboratory: experiments and checked mathematics about the algorithms, without a network."""
