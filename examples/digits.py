"""Write scikit-learn's handwritten digits as Parquet, for the recipes recipes/images/digits-*.yaml.

They are 1797 images of 8 by 8 pixels (E. Alpaydin and C. Kaynak, 1998, UCI Machine Learning Repository).

    pip install scikit-learn
    python examples/digits.py digits.parquet
"""

import argparse
import io

import pyarrow
import pyarrow.parquet
from PIL import Image
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("output", help="file to write")
output = parser.parse_args().output

digits = load_digits()
files = []
for pixels in digits.images:
    file = io.BytesIO()
    Image.fromarray((pixels * 255 / 16).astype("uint8")).save(file, format="PNG")
    files.append({"bytes": file.getvalue(), "path": None})
table = pyarrow.table({"image": files, "label": digits.target.tolist()})
pyarrow.parquet.write_table(table, output)
print(f"{output}: {len(files)} images of {len(digits.target_names)} classes")
