"""Where pieces lie on their way: one module a transport, all behind the protocol of ring_backend.py."""
