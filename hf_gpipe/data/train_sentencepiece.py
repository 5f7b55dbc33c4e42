"""The process that trains SentencePiece: python train_sentencepiece.py OPTIONS FILE.

Texts come on stdin, as JSON lines. It imports nothing of this package, which would load torch.
"""

from __future__ import annotations

import ctypes
import io
import json
import signal
import sys

import sentencepiece


def main() -> int:
    """Write the trained model to FILE. Returns the exit code; what went wrong is on stderr."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: whoever waits for the model may be killed
    trained = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=map(json.loads, sys.stdin.buffer),
            model_writer=trained,
            **json.loads(sys.argv[1]),
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            byte_fallback=True,
            split_digits=True,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=3,
            pad_piece="<pad>",
            eos_piece="</s>",
            unk_piece="<unk>",
            bos_piece="<s>",
            # Sums of floats depend on how they are shared out, so the number of threads is part of the result.
            num_threads=4,
            # Longer texts would be left out without a word; this is as long as SentencePiece allows.
            max_sentence_length=2**30,
            minloglevel=2,
        )
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    with open(sys.argv[2], "wb") as file:
        file.write(trained.getvalue())
    return 0


if __name__ == "__main__":
    sys.exit(main())
