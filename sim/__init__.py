"""Virtual clock, device cost models, trace replay: production schedulers, trees and router run on them."""
