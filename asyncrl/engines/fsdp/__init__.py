"""The FSDP2 training engine: any Hugging Face causal LM, sharded over ranks, one optimizer update per mini-batch.

    TrainBatch ─ collate ─▶ arrays ─ advantages ─▶ plan of micro-batches ─▶ [lp_prox] ─▶ forward, loss, backward … ─▶ AdamW
                                                                      model.py, head.py    update.py               engine.py
                          critic.py (values)          reference.py (divergence)

Every rank is handed the same batch, computes what concerns the whole of it (advantages, denominators, plans) by itself, and runs
its own share of the micro-batches; gradients are summed. `process_group.py` is where ranks meet.

    engine ─ state.py: tensors by name ─▶ copy aside ─ saving.py: a thread ─▶ StateFiles ─▶ a checkpoint's folder
"""

from asyncrl.engines.fsdp.engine import FsdpEngine
from asyncrl.engines.fsdp.launcher import FsdpLauncher

__all__ = ["FsdpEngine", "FsdpLauncher"]
