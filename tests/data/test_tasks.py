"""Labelled texts from every layout we claim to read, and the words for those that are wrong."""

import gzip
import json

import pytest
from tiny import write_task

from oelm.config import TaskConfig
from oelm.data.tasks import TASKS, describe, load_task


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def splits(folder, name, files, **more):
    for file, text in files.items():
        write(folder / file, text)
    return load_task(TaskConfig(name=name, path=str(folder), **more))


def test_sst2_in_glues_layout(tmp_path):
    data = load_task(TaskConfig(name="sst2", path=str(write_task(tmp_path))))
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 80, "validation": 30, "test": 24}
    first = (tmp_path / "dev.tsv").read_text().splitlines()[1]
    examples = data.splits["validation"]
    assert f"{examples.texts[0][0]}\t{examples.labels[0]}" == first


MNLI = 'index\tsentence1\tsentence2\tlabel1\tgold_label\n0\tA "dog.\tAn animal.\tneutral\tentailment\n'


def test_mnli_has_matched_and_mismatched_and_leaves_rows_without_a_gold_label_out(tmp_path):
    unsure = "1\tA cat.\tA dog.\tneutral\t-\n"
    files = {"train.tsv": MNLI + unsure, "dev_matched.tsv": MNLI, "dev_mismatched.tsv": MNLI,
             "test_matched.tsv": "index\tsentence1\tsentence2\n0\ta\tb\n"}  # fmt: skip
    data = splits(tmp_path, "mnli", files)
    assert list(data.splits) == ["train", "validation", "mismatched"]  # the test file has no labels
    assert data.splits["train"].texts == (['A "dog.'], ["An animal."])
    assert data.splits["train"].labels == [0]
    assert data.unlabelled == {"train": 1}


def test_xnli_takes_its_language_by_file_name_or_by_column(tmp_path):
    head = "premise\thypothesis\tlabel\n"
    files = {
        f"{split}-{lang}.tsv": head + f"{lang}\th\tneutral\n" for split in ("dev", "test") for lang in ("en", "fr")
    }
    files["multinli.train.fr.tsv"] = "premise\thypo\tlabel\n".replace("hypo", "hypothesis") + "p\th\tcontradictory\n"
    data = splits(tmp_path / "names", "xnli", files, language="fr")
    assert data.splits["validation"].texts[0] == ["fr"]
    assert data.splits["train"].labels == [2]
    both = "language\tgold_label\tsentence1\tsentence2\nfr\tneutral\tp\th\nen\tentailment\tq\ti\n"
    one = splits(tmp_path / "column", "xnli", {"train.tsv": both, "xnli.dev.tsv": both})
    assert one.splits["validation"].texts == (["q"], ["i"])


def test_cola_without_a_header_and_agnews_with_its_own_numbers(tmp_path):
    row = "gj04\t1\t\tThe sailors rode.\n"
    cola = splits(tmp_path / "cola", "cola", {"train.tsv": row + row.replace("\t1\t", "\t0\t*"), "dev.tsv": row})
    assert (cola.splits["train"].labels, cola.metric) == ([1, 0], "matthews")
    table = 'Class Index,Title,Description\n4,"Chips, fast",New\n1,Peace,Talks\n'
    news = splits(tmp_path / "news", "agnews", {"train.csv": table, "validation.csv": table})
    assert news.splits["train"].labels == [3, 0]
    assert news.splits["train"].texts == (["Chips, fast", "Peace"], ["New", "Talks"])


def test_parquet_of_the_hub_and_compressed_lines_read_alike(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"sentence": "fine", "label": 1, "idx": 0}, {"sentence": "poor", "label": 0, "idx": 1}]
    hub = tmp_path / "hub"
    hub.mkdir()
    for name in ("train", "validation"):
        pq.write_table(pa.Table.from_pylist(rows), hub / f"{name}-00000-of-00001.parquet")
    hidden = [{"sentence": "x", "label": -1, "idx": 0}]  # as the hub keeps GLUE's test splits
    pq.write_table(pa.Table.from_pylist(hidden), hub / "test-00000-of-00001.parquet")
    lines = tmp_path / "lines"
    lines.mkdir()
    for name in ("train", "dev"):
        with gzip.open(lines / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    a, b = (load_task(TaskConfig(name="sst2", path=str(folder))) for folder in (hub, lines))
    assert a.splits == b.splits
    assert a.unlabelled == {"test": 1}


def test_own_files_map_their_label_names_in_the_given_order(tmp_path):
    table = "title,stars\nnice,many\nawful,few\n"
    files = {name: str(write(tmp_path / f"{name}.csv", table)) for name in ("train", "validation")}
    own = {"name": "own", "text": ["title"], "label": "stars", "labels": ["few", "many"]}
    assert load_task(TaskConfig(**files, **own)).splits["train"].labels == [1, 0]
    write(tmp_path / "train.csv", "title,stars\nnice,1\n")  # a number is no name: which class would it be?
    with pytest.raises(ValueError, match="train.csv: line 2: label '1' is not one of few, many"):
        load_task(TaskConfig(**files, **own))
    with pytest.raises(ValueError, match="own files need task.validation, task.text, task.label, task.labels too"):
        load_task(TaskConfig(name="own", train=files["train"]))


def test_the_subset_is_the_same_whatever_asks_for_it(tmp_path):
    config = TaskConfig(name="sst2", path=str(write_task(tmp_path)), train_examples=20)
    a, b = (load_task(config).splits["train"] for _ in range(2))
    assert len(a) == 20
    assert a == b
    assert a.sha256 == b.sha256 != load_task(config.model_copy(update={"train_examples": 21})).splits["train"].sha256
    with pytest.raises(ValueError, match="task.train_examples: 99 wanted, the training split has 80"):
        load_task(config.model_copy(update={"train_examples": 99}))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("sentence\tlabel\nfine\tgood\n", r"train.tsv: line 2: label 'good' is not one of negative, positive, 0, 1"),
        ("sentence\tlabel\nfine\t1\npoor\t2\n", r"train.tsv: line 3: label '2' is not one of"),
        ("text\tlabel\nfine\t1\n", r"train.tsv: needs the columns sentence, label; has text, label"),
        ("sentence\tlabel\n", r"task.train: no labelled row in .*train.tsv"),
        ("sentence\tlabel\nfine\n", r"train.tsv: line 2: 1 columns, where there should be 2"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named_with_its_row(tmp_path, train, message):
    write_task(tmp_path)
    write(tmp_path / "train.tsv", train)
    with pytest.raises(ValueError, match=message):
        load_task(TaskConfig(name="sst2", path=str(tmp_path)))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"name": "sst3"}, ValueError, "task.name: unknown 'sst3'; did you mean 'sst2'?"),
        ({"name": "rte", "language": "fr"}, ValueError, "only xnli has languages"),
        ({"name": "xnli", "language": "xx"}, ValueError, "task.language: unknown 'xx'"),
        ({"name": "sst2", "text": ["a"]}, ValueError, "are for task.name=own"),
        ({"name": "own", "train": "a", "validation": "b", "text": ["t"], "label": "l", "labels": ["x", "y", "x"]},
         ValueError, "task.labels: x is named twice"),
        ({"name": "sst2", "path": "nowhere"}, FileNotFoundError, "task.path=nowhere: no such folder"),
        ({"name": "sst2", "train": "no.tsv"}, ValueError, "task.validation: no file for it"),
        ({"name": "sst2", "train": "no.tsv", "validation": "no.tsv"}, FileNotFoundError, "no.tsv: no such file"),
    ],
)  # fmt: skip
def test_a_wrong_config_is_one_clear_line(fields, error, message):
    with pytest.raises(error, match=message):
        load_task(TaskConfig(**fields))


def test_a_language_column_means_something_to_xnli_alone(tmp_path):
    table = "title,stars,language\nnice,many,en\nschlecht,few,de\n"
    files = {name: str(write(tmp_path / f"{name}.csv", table)) for name in ("train", "validation")}
    own = TaskConfig(name="own", text=["title"], label="stars", labels=["few", "many"], **files)
    assert len(load_task(own).splits["train"]) == 2


def test_two_files_of_one_split_are_not_added_up(tmp_path):
    write_task(tmp_path)
    write(tmp_path / "dev.jsonl", json.dumps({"sentence": "fine", "label": 1}) + "\n")
    with pytest.raises(ValueError, match="dev.jsonl and dev.tsv are both for validation; name one"):
        load_task(TaskConfig(name="sst2", path=str(tmp_path)))


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path):
    write_task(tmp_path)
    (tmp_path / "dev.tsv").write_bytes(b"\xef\xbb\xbfsentence\tlabel\nfine\t1\n")
    assert load_task(TaskConfig(name="sst2", path=str(tmp_path))).splits["validation"].labels == [1]


def test_agnews_has_its_test_set_for_validation(tmp_path):
    table = "text,label\nnews,2\n"
    news = splits(tmp_path, "agnews", {"train.csv": table, "test.csv": table})
    assert list(news.splits) == ["train", "validation"]


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    write_task(tmp_path)
    (tmp_path / "dev.tsv").rename(tmp_path / "dev.parquet")
    with pytest.raises(ValueError, match="dev.parquet: damaged, or not a .parquet file"):
        load_task(TaskConfig(name="sst2", path=str(tmp_path)))


def test_a_broken_line_of_json_is_named_by_its_number(tmp_path):
    folder = write_task(tmp_path)
    (folder / "train.tsv").unlink()
    (folder / "train.jsonl").write_text('{"sentence": "fine", "label": 1}\n\n{"sentence": "poor"\n')
    with pytest.raises(ValueError, match="train.jsonl: line 3: not JSON"):
        load_task(TaskConfig(name="sst2", path=str(folder)))


def test_a_damaged_archive_is_named(tmp_path):
    write_task(tmp_path)
    (tmp_path / "train.tsv").rename(tmp_path / "train.tsv.xz")
    with pytest.raises(ValueError, match="train.tsv.xz: damaged, or not a .tsv file"):
        load_task(TaskConfig(name="sst2", path=str(tmp_path)))


def test_the_table_is_whole():
    for name, known in TASKS.items():
        assert describe(TaskConfig(name=name)) is known
        assert {"train", "validation"} <= set(known.splits)
        assert len(known.revision) == 40


def test_a_file_without_a_header_is_called_that(tmp_path):
    headerless = write(tmp_path / "train.tsv", "a very good film\t1\na dull film\t0\n")
    with pytest.raises(ValueError, match=r"train.tsv: has no header \(line 1 is: a very good film \| 1\); put a line"):
        load_task(TaskConfig(name="sst2", path=str(tmp_path), validation=str(headerless)))
    other = write(tmp_path / "train.tsv", "review\tstars\na very good film\t1\n")
    with pytest.raises(ValueError, match="needs the columns sentence, label; has review, stars"):
        load_task(TaskConfig(name="sst2", path=str(tmp_path), validation=str(other)))
