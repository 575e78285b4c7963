"""MessageQueue: the bounded queue and the ledger, in one process so that they never disagree.

    rollouter ══trajectories══▶ [rollouts] ══▶ reward ══scored groups══▶ [scored] ══▶ trainer
                                     ▲                                      │ accepted: queued, its trajectories settled
        ledger.dispatch, .end ───────┴───────────── Ledger ◀────────────────┘
        ledger.finish_step   ──── an end: its messages settled in both ────▶ ledger.watch, .live

loop              consumes                  waits for                  is unblocked by
broker            frames of both ends       a socket to be readable    a sender, a receiver
rpc               calls                     a socket to be readable    rollouter, reward, trainer, CLI
ledger.watch      events                    the first after `since`    an end, a step, its own timeout
file              changes of 50 ms          a timer                    the first change; at once for a finished step
run               nothing                   the end                    `stop`, a broken broker or file
"""

from asyncrl.services.message_queue.service import MessageQueueService
from asyncrl.services.message_queue.settling import connect, topics_of

__all__ = ["MessageQueueService", "connect", "topics_of"]
