"""MessageQueue: the bounded queue, its journal and the ledger, in one process so that they never disagree.

    rollouter ══trajectories══▶ [rollouts] ══▶ reward ══scored groups══▶ [scored] ══▶ trainer
                                     ▲                                      │ accepted: queued, its trajectories settled
        ledger.dispatch, .end ───────┴───────────── Ledger ◀────────────────┘
        ledger.finish_step   ──── an end: its messages settled in both ────▶ ledger.watch, .live

loop              consumes                  waits for                  is unblocked by
broker            frames of both ends       a socket to be readable    a sender, a receiver
rpc               calls                     a socket to be readable    rollouter, reward, trainer, CLI
ledger.watch      events                    the first after `since`    an end, a step, its own timeout
file              changes of one turn       the loop to come round     the first change; what the queue accepts, at once
run               nothing                   the end                    `stop`, a broken broker or file
"""

from asyncrl.services.message_queue.recovery import Fresh, Recovery, Restarted, SetBack
from asyncrl.services.message_queue.service import MessageQueueService
from asyncrl.services.message_queue.settling import connect, topics_of

__all__ = ["Fresh", "MessageQueueService", "Recovery", "Restarted", "SetBack", "connect", "topics_of"]
