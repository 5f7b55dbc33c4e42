"""Write questions about scikit-learn's handwritten digits, and a small new LLaVA, for recipes/images/questions.yaml.

One in five rows has no image, and one in five has two images: "which digits are these ? three seven". The digits are
1797 images of 8 by 8 pixels (E. Alpaydin and C. Kaynak, 1998, UCI Machine Learning Repository). Every sixth is held
out.

    pip install scikit-learn
    python examples/digit_questions.py questions
"""

import argparse
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
OTHERS = ["which", "digit", "digits", "is", "are", "this", "these", "follows", "?"]
WORDS = ["<pad>", "</s>", "<image>", *DIGITS, *OTHERS]
SIDE, PATCH = 8, 2


def bytes_of(pixels: Any) -> dict[str, Any]:
    """An image as a column of images has it."""
    file = io.BytesIO()
    Image.fromarray((pixels * 255 / 16).astype("uint8")).save(file, format="PNG")
    return {"bytes": file.getvalue(), "path": None}


def write_rows(folder: Path, images: Iterable[Any], numbers: Iterable[int]) -> int:
    """Write a Parquet file of each split; the number of rows.

    Args:
        folder: where the files come.
        images: arrays (8, 8) of values up to 16.
        numbers: the digit of each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    given = list(zip(map(bytes_of, images), (DIGITS[number] for number in numbers), strict=True))
    for number, (image, word) in enumerate(given):
        shown, question, answer = [image], "which digit is this ?", word
        if number % 5 == 0:
            another, second = given[number - 1]
            shown, question, answer = [image, another], "which digits are these ?", f"{word} {second}"
        elif number % 5 == 1:
            after = DIGITS[(DIGITS.index(word) + 1) % 10]
            shown, question, answer = [], f"which digit follows {word} ?", after
        places = " ".join(["<image>"] * len(shown))
        rows.append({"images": shown, "prompt": f"{places} {question}".strip(), "completion": f"{answer} </s>"})
    for split, chosen in (
        ("train", [row for number, row in enumerate(rows) if number % 6]),
        ("test", rows[::6]),
    ):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chosen), folder / f"{split}.parquet")
    return len(rows)


def write_model(folder: Path) -> int:
    """Write the model, its words and its processor; the number of its parameters."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", additional_special_tokens=["<image>"]
    )
    size = {"height": SIDE, "width": SIDE}
    LlavaProcessor(
        CLIPImageProcessorPil(size=size, crop_size=size),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    widths = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 3}
    vision = CLIPVisionConfig(image_size=SIDE, patch_size=PATCH, **widths)
    text = LlamaConfig(vocab_size=len(WORDS), bos_token_id=None, eos_token_id=1, pad_token_id=0, **widths)
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=WORDS.index("<image>"), vision_feature_layer=-1
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    model.save_pretrained(folder)
    return model.num_parameters()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write: model and data")
    folder = parser.parse_args().folder
    from sklearn.datasets import load_digits

    digits = load_digits()
    print(f"{folder}/data: {write_rows(folder / 'data', digits.images, digits.target)} rows")
    print(f"{folder}/model: {write_model(folder / 'model'):,} parameters")


if __name__ == "__main__":
    main()
