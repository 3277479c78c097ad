"""Which blocks hold which prefix: BlockPool, RadixTree, RadixCache, and the gateway's PrefixIndex. Integers only."""
