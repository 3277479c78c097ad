"""Definition of the checksum of a piece, and its CPU implementation: 64-bit integers in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

LENGTH_FACTOR = 0x2545F4914F6CDD1D  # odd, so that no two lengths give the same product
KEY_OFFSET = 1 << 31  # the index whose key is 0 is the first one that cannot occur
KEY_FACTORS = (0x9E3779B1, 0x85EBCA6B)  # odd: multiplication modulo 2^32 can be undone, and so can the xor-shifts
_LOW_32 = 0xFFFFFFFF
_CHUNK_WORDS = 1 << 18  # temporaries of a chunk stay in the processor's cache


def checksum(buffer: Tensor) -> Tensor:
    """`length * LENGTH_FACTOR + sum(word[i] * key[i])` modulo 2^64, as an int64 scalar.

    `buffer` is uint8 `[n]`, contiguous; words are its little-endian 32-bit words, the last one filled up with zeros.
    Keys are a bijection of the index and never 0 (`word_keys`), so a change in one word, an exchange of two words and
    zeros cut off or added at the end change the sum for certain; any other change but for a chance of about 2^-32
    (multilinear hashing: Lemire and Kaser, 2014). A sum of integers is the same in any order.
    """
    num_bytes = buffer.numel()
    aligned = num_bytes % 4 == 0 and buffer.storage_offset() % 4 == 0
    words = (buffer if aligned else F.pad(buffer, (0, -num_bytes % 4))).view(torch.int32)
    total = torch.tensor(num_bytes, dtype=torch.int64) * LENGTH_FACTOR
    for first in range(0, len(words), _CHUNK_WORDS):
        chunk = words[first : first + _CHUNK_WORDS].to(torch.int64) & _LOW_32
        total += (chunk * word_keys(torch.arange(first, first + len(chunk)))).sum()
    return total


def word_keys(index: Tensor) -> Tensor:
    """The key of each word index (int64, below 2^31): from 1 to 2^32 - 1, no two alike."""
    key = ((index + KEY_OFFSET) * KEY_FACTORS[0]) & _LOW_32
    key = ((key ^ (key >> 16)) * KEY_FACTORS[1]) & _LOW_32
    return key ^ (key >> 15)
