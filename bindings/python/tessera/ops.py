# SPDX-License-Identifier: Apache-2.0
"""The kernels, for arrays of NumPy, PyTorch or any library with DLPack, without a copy. docs/c_api.md and the headers of
src/ops state what is computed; _tessera.pyi states shapes and dtypes.

Arrays are dense and row-major, aligned to 16 bytes, in memory of the context's device. Where BF16 is due, NumPy gives and
gets its bits as uint16. Results are new arrays of the first argument's library, or are written into `out`. Work on a GPU is
queued on the context's stream: Context.synchronize() waits for it. A context serves one thread at a time, others wait."""
from ._tessera import Attention, Context, ExpertGroup, Linear, Moe, RankExperts, RankListener, Weight

__all__ = ['Attention', 'Context', 'ExpertGroup', 'Linear', 'Moe', 'RankExperts', 'RankListener', 'Weight']
