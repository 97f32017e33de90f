//! What a step exports comes back from the files, and what others wrote becomes a step.

use std::path::Path;

use bytes::Bytes;
use forebay_core::{ErrorKind, ObjectKey, Result};
use forebay_io::object::{Bucket, BucketUrl, Condition, Faults, StoreSettings};
use serde_json::{Value, json};
use tokio::runtime::Handle;

use super::*;
use crate::catalog::{Start, list_steps, load_manifest};
use crate::manifest::{Manifest, SliceKind};

/// A file of float32 tensors of these shapes, whose bytes count up.
fn file(tensors: &[(&str, &[u64])]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    for (name, shape) in tensors {
        let start = data.len();
        let length = shape.iter().product::<u64>() * 4;
        data.extend((0..length).map(|at| (at / 7 + start as u64) as u8));
        let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]});
        header.insert((*name).into(), entry);
    }
    let header = Value::from(header).to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
}

async fn directory(path: &Path) -> Bucket {
    let url: BucketUrl = format!("file://{}", path.display()).parse().expect("a URL");
    Bucket::open(&url, &StoreSettings::default()).await.expect("open")
}

fn start(number: u64) -> Start {
    Start { nonce: format!("{number:032x}"), host: "h".into(), pid: 1, started_ms: 5 }
}

async fn newest(bucket: &Bucket) -> Manifest {
    let step = list_steps(bucket).await.expect("steps").pop().expect("a step");
    load_manifest(bucket, &step.key).await.expect("the manifest")
}

async fn export(
    (bucket, manifest): (&Bucket, &Manifest),
    part: &str,
    file_bytes: u64,
    folder: &Path,
    shared: Option<&Path>,
) -> Result<Exported> {
    let (runtime, bucket, manifest) = (Handle::current(), bucket.clone(), manifest.clone());
    let (part, folder, shared) = (part.to_owned(), folder.to_owned(), shared.map(Path::to_owned));
    let work = move || {
        std::fs::create_dir_all(&folder)?;
        let plan = Export::plan(&manifest, &part, file_bytes)?;
        plan.write((&runtime, &bucket), &folder, shared.as_deref(), &|_| {})
    };
    tokio::task::spawn_blocking(work).await.expect("join")
}

/// The bytes of every tensor of a directory, by name.
async fn contents(folder: &Path) -> Vec<(String, Vec<u64>, Bytes)> {
    let bucket = directory(folder).await;
    let mut found = Vec::new();
    let names = std::fs::read_dir(folder).expect("a directory");
    for name in names.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")) {
        if !name.ends_with(".safetensors") {
            continue;
        }
        let key = ObjectKey::new(&name);
        let (entries, _) = header::read(&bucket, &key).await.expect("a header");
        for (tensor, entry) in entries {
            let data = bucket.get(&key, None, entry.range).await.expect("bytes");
            found.push((tensor, entry.shape, data));
        }
    }
    found.sort_by(|one, two| one.0.cmp(&two.0));
    found
}

#[tokio::test]
async fn a_directory_becomes_a_step_and_a_directory_again() {
    let scratch = tempfile::tempdir().expect("scratch");
    let (one, two) = (scratch.path().join("one"), scratch.path().join("two"));
    std::fs::create_dir(&one).expect("a directory");
    let large: &[u64] = &[3, 1 << 18];
    std::fs::write(one.join("a.safetensors"), file(&[("layers.0.w", large), ("b#1", &[5])])).expect("write");
    std::fs::write(one.join("b.safetensors"), file(&[("empty", &[0, 3]), ("scalar", &[])])).expect("write");
    let weights = json!({"layers.0.w": "a.safetensors", "b#1": "a.safetensors", "empty": "b.safetensors", "scalar": "b.safetensors"});
    std::fs::write(one.join(INDEX), json!({"metadata": {}, "weight_map": weights}).to_string())
        .expect("write");
    let run = Bucket::in_memory();
    let imported =
        import(&directory(&one).await, &run, start(1), 7, "nets.actor", &|_| {}).await.expect("import");
    let bytes = (3 << 20) + 5 * 4 + 4;
    assert_eq!(imported, Imported { step: 7, tensors: 4, bytes, warnings: Vec::new() });
    assert_eq!(crate::verify(&run, None, &|_| {}).await.expect("verify"), []);
    let manifest = newest(&run).await;
    let names: Vec<_> = manifest.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["nets.actor.b_1", "nets.actor.empty", "nets.actor.layers.0.w", "nets.actor.scalar"]);
    assert_eq!(manifest.tensors[2].slices.len(), 12, "pieces of 256 KiB");

    let exported = export((&run, &manifest), "nets.actor", 1 << 20, &two, None).await.expect("export");
    assert_eq!((exported.files.len(), exported.tensors, exported.bytes), (3, 4, bytes));
    assert_eq!((exported.shared_bytes, exported.streamed.len()), (0, 0));
    assert_eq!(contents(&two).await, contents(&one).await);
    let refused = export((&run, &manifest), "nets.actor", 1 << 20, &two, None).await.expect_err("again");
    assert!(refused.message().contains("holds a model already"), "{refused}");
    let refused = export((&run, &manifest), "nets.critic", 1, &one, None).await.expect_err("no such part");
    assert!(refused.message().contains("`critic` is not among `actor`"), "{refused}");
    // A later start's steps count, as with any other save.
    import(&directory(&two).await, &run, start(2), 3, "", &|_| {}).await.expect("import");
    assert_eq!(newest(&run).await.step, 3);
}

/// What was read of two versions was committed, its checksums right.
#[tokio::test]
async fn a_file_that_is_replaced_while_it_is_read_is_told() {
    let scratch = tempfile::tempdir().expect("scratch");
    let (model, run) = (scratch.path().join(WHOLE), Bucket::in_memory());
    let from = directory(scratch.path()).await;
    // The index that is not there, the file's size, length and text of the header; then its tensor.
    for nth in 3..=5 {
        std::fs::write(&model, file(&[("w", &[1 << 10])])).expect("write");
        let faults = Faults::default();
        let (gate, from) = (faults.gate(nth), from.with_faults(&faults));
        let replace = async {
            gate.reached().await;
            std::fs::write(scratch.path().join("new"), file(&[("v", &[1 << 10])])).expect("write");
            std::fs::rename(scratch.path().join("new"), &model).expect("rename");
            gate.open();
        };
        let (outcome, ()) = tokio::join!(import(&from, &run, start(nth), 1, "", &|_| {}), replace);
        assert_eq!(outcome.expect_err("replaced").kind(), ErrorKind::Stale, "before request {nth}");
        assert_eq!(list_steps(&run).await.expect("steps"), []);
    }
}

/// A tree with every kind of container, a deep one, and views of `w` and `many`.
fn state_of_everything() -> Value {
    let tensor = |name: &str| json!({"t": "tensor", "n": name});
    let object = |state: Value| json!({"t": "object", "k": "other", "v": state});
    let deep = (0..190).fold(json!(7), |inner, _| json!({"t": "dict", "v": [["in", inner]]}));
    let view = |shape: Value, stride: Value, offset| json!({"t": "tensor", "n": "w", "view": [shape, stride, offset]});
    json!({"t": "dict", "v": [
        ["m", {"t": "object", "k": "module", "v": {"t": "odict", "v": [
            ["w", tensor("w")], ["many", tensor("many")], [3, view(json!([2, 6]), json!([6, 1]), 12)],
            ["turned", view(json!([6, 8]), json!([1, 6]), 0)], ["list", [tensor("w"), {"t": "bytes", "v": ""}]],
            ["seen", {"t": "counter", "v": [["w", 3]]}],
            ["z", {"t": "defaultdict", "f": "dict", "v": [["x", {"t": "counter", "v": [["y", object(object(tensor("w")))]]}]]}]
        ]}}],
        ["deep", deep],
        ["named", {"t": "dict", "v": [["__metadata__", tensor("w")]]}],
        ["bad", view(json!([2, 6]), json!([6, 1]), 37)],
        ["lost", tensor("x")],
    ]})
}

#[tokio::test]
async fn views_columns_and_shared_bytes_are_exported() {
    let scratch = tempfile::tempdir().expect("scratch");
    let (hub, place) = (scratch.path().join("hub"), scratch.path().join("run"));
    for folder in [&hub, &place] {
        std::fs::create_dir(folder).expect("a directory");
    }
    std::fs::write(hub.join(WHOLE), file(&[("w", &[8, 6]), ("many", &[2000, 2])])).expect("write");
    let run = directory(&place).await;
    import(&directory(&hub).await, &run, start(1), 1, "", &|_| {}).await.expect("import");
    let mut manifest = newest(&run).await;
    // As if `many` had been stored column by column, its bytes aside.
    let many = manifest.tensors.iter_mut().find(|tensor| tensor.name == "many").expect("many");
    let (slice, key) = (many.slices[0].clone(), ObjectKey::new(&manifest.shards[0].key));
    let all = run.get(&key, None, slice.start..slice.end).await.expect("bytes");
    many.slices = (0..2)
        .map(|column| {
            let mut part = slice.clone();
            (part.offsets, part.lengths) = (vec![0, column], vec![2000, 1]);
            (part.start, part.end) = (slice.start + column * 8000, slice.start + column * 8000 + 8000);
            part.kind = SliceKind::Box;
            let bytes = &all[column as usize * 8000..][..8000];
            part.crc32c = crate::manifest::Checksum(forebay_core::crc32c(bytes));
            part
        })
        .collect();
    manifest.extras[0].data = state_of_everything().to_string();
    for shared in [None, Some(place.as_path())] {
        let out = scratch.path().join(if shared.is_some() { "shared" } else { "streamed" });
        let exported = export((&run, &manifest), "m", u64::MAX, &out, shared).await.expect("export");
        let found = contents(&out).await;
        let names: Vec<_> = found.iter().map(|(name, _, _)| name.as_str()).collect();
        assert_eq!(names, ["3", "list.0", "many", "turned", "w", "z.x.y"]);
        let w = &found[4].2;
        assert_eq!((&found[1].2, &found[5].2, &found[0].2[..]), (w, w, &w[48..96]));
        let turned: Vec<u8> = (0..48).flat_map(|at| w[(at % 8 * 6 + at / 8) * 4..][..4].to_vec()).collect();
        assert_eq!((found[3].2.as_ref(), &found[3].1), (turned.as_slice(), &vec![6, 8]));
        let rows: Vec<u8> =
            (0..4000).flat_map(|at| all[(at % 2 * 2000 + at / 2) * 4..][..4].to_vec()).collect();
        assert!(found[2].2 == rows, "columns are put together");
        match shared {
            None => assert_eq!((exported.shared_bytes, exported.streamed.len()), (0, 0)),
            Some(_) => {
                assert_eq!(exported.shared_bytes, 3 * 192 + 48);
                assert_eq!(exported.streamed, ["many", "turned"], "what lies in too many runs");
            }
        }
    }
    let error =
        export((&run, &manifest), "named", 1, scratch.path(), None).await.expect_err("a header's name");
    assert_eq!(
        (error.kind(), error.message().contains("__metadata__")),
        (ErrorKind::Invalid, true),
        "{error}"
    );
    for (part, why) in [("bad", "a view that its tensor cannot have"), ("lost", "which it does not hold")] {
        let error = export((&run, &manifest), part, 1, scratch.path(), None).await.expect_err(part);
        assert_eq!((error.kind(), error.message().contains(why)), (ErrorKind::Corrupt, true), "{error}");
    }
}

#[tokio::test]
async fn damage_is_neither_exported_nor_saved() {
    let scratch = tempfile::tempdir().expect("scratch");
    let (hub, out) = (scratch.path().join("hub"), scratch.path().join("out"));
    std::fs::create_dir(&hub).expect("a directory");
    std::fs::write(hub.join(WHOLE), file(&[("a", &[1000]), ("b", &[1000])])).expect("write");
    let run = Bucket::in_memory();
    import(&directory(&hub).await, &run, start(1), 1, "model", &|_| {}).await.expect("import");
    let manifest = newest(&run).await;
    let key = ObjectKey::new(&manifest.shards[0].key);
    let mut data = run.get_whole(&key).await.expect("get").0.to_vec();
    *data.last_mut().expect("a byte") ^= 1;
    run.put(&key, data.into(), Condition::Always).await.expect("put");
    let error = export((&run, &manifest), "model", 4000, &out, None).await.expect_err("a flipped bit");
    assert!(error.kind() == ErrorKind::Corrupt && error.message().contains("`model.b`"), "{error}");
    assert_eq!(
        std::fs::read_dir(&out).expect("a directory").count(),
        0,
        "the sound file is not there either"
    );

    let whole = std::fs::read(hub.join(WHOLE)).expect("read");
    std::fs::write(hub.join(WHOLE), &whole[..whole.len() - 1]).expect("write");
    let steps = list_steps(&run).await.expect("steps").len();
    let error = import(&directory(&hub).await, &run, start(2), 2, "", &|_| {}).await.expect_err("too short");
    assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains("`b` of [1000]"), "{error}");
    let index = json!({"weight_map": {"a": "../hub/model.safetensors"}}).to_string();
    std::fs::write(hub.join(INDEX), index).expect("write");
    let error = import(&directory(&hub).await, &run, start(3), 2, "", &|_| {}).await.expect_err("outside");
    assert!(error.message().contains("is no file of this directory"), "{error}");
    assert_eq!(list_steps(&run).await.expect("steps").len(), steps);
    let nothing = import(&directory(&out).await, &run, start(4), 2, "", &|_| {}).await.expect_err("nothing");
    assert_eq!(nothing.kind(), ErrorKind::NotFound);
}

/// Tensors and their shapes.
type Shapes<'a> = [(&'a str, &'a [u64])];

/// A directory of two files, `one` and `two`, and what its index says. What comes of importing it, and the step's tensors.
async fn import_indexed(
    one: &Shapes<'_>,
    two: &Shapes<'_>,
    index: Value,
    whole: bool,
) -> Result<(Vec<(String, Vec<u64>)>, Vec<String>)> {
    let scratch = tempfile::tempdir().expect("scratch");
    let write = |name: &str, data: Vec<u8>| std::fs::write(scratch.path().join(name), data).expect("write");
    write("one.safetensors", file(one));
    write("two.safetensors", file(two));
    write(INDEX, json!({"metadata": {}, "weight_map": index}).to_string().into());
    if whole {
        write(WHOLE, file(&[("a", &[9])]));
    }
    let run = Bucket::in_memory();
    let imported = import(&directory(scratch.path()).await, &run, start(1), 1, "", &|_| {}).await;
    let steps = list_steps(&run).await.expect("steps").len();
    assert_eq!(steps, usize::from(imported.is_ok()), "a step is there, or none was begun");
    let tensors = match &imported {
        Ok(_) => newest(&run).await.tensors.into_iter().map(|tensor| (tensor.name, tensor.shape)).collect(),
        Err(_) => Vec::new(),
    };
    imported.map(|imported| (tensors, imported.warnings))
}

/// Files of two versions of a model lay in one directory: the step lacked what the index had in a file that was without it.
#[tokio::test]
async fn a_tensor_that_its_file_lacks_is_told() {
    let map = json!({"a": "one.safetensors", "lm_head": "two.safetensors"});
    for two in [&[("b", &[2u64] as &[u64])] as &[_], &[]] {
        let error = import_indexed(&[("a", &[1])], two, map.clone(), false).await.expect_err("lacks one");
        let told = "has tensor `lm_head` in `two.safetensors`, which does not hold it";
        assert!(error.kind() == ErrorKind::Corrupt && error.message().contains(told), "{error}");
    }
    // In another file than the index says it is another tensor.
    let one: &Shapes<'_> = &[("a", &[1]), ("lm_head", &[1])];
    let error = import_indexed(one, &[], map, false).await.expect_err("lacks one");
    assert!(error.message().contains("`lm_head` in `two.safetensors`"), "{error}");
    let error = import_indexed(one, &[], json!({}), false).await.expect_err("an empty index");
    assert!(error.kind() == ErrorKind::Corrupt && error.message().contains("names no tensors"), "{error}");
}

#[tokio::test]
async fn each_tensor_comes_from_the_file_that_the_index_says() {
    let found = |names: &[(&str, u64)]| {
        names.iter().map(|(name, length)| ((*name).to_owned(), vec![*length])).collect::<Vec<_>>()
    };
    let map =
        |b: &str| json!({"a": "one.safetensors", "b": format!("{b}.safetensors"), "c": "two.safetensors"});
    let (one, two): (&Shapes<'_>, &Shapes<'_>) = (&[("a", &[1]), ("b", &[2])], &[("b", &[3]), ("c", &[4])]);
    for (place, length, left) in
        [("two", 3, "`b` of `one.safetensors`;"), ("one", 2, "`b` of `two.safetensors`;")]
    {
        let (tensors, warnings) = import_indexed(one, two, map(place), false).await.expect("import");
        assert_eq!(tensors, found(&[("a", 1), ("b", length), ("c", 4)]), "{place}");
        assert!(
            warnings.len() == 1 && warnings[0].contains(&format!("left out of the step: {left}")),
            "{warnings:?}"
        );
    }
    // What the index does not know is in the step as well, where it is clear which.
    let map = json!({"a": "one.safetensors", "c": "two.safetensors"});
    let (tensors, warnings) = import_indexed(one, &[("c", &[4])], map.clone(), false).await.expect("import");
    assert_eq!(tensors, found(&[("a", 1), ("b", 2), ("c", 4)]));
    let told = "in the step nevertheless: `b` of `one.safetensors`;";
    assert!(warnings.len() == 1 && warnings[0].contains(told), "{warnings:?}");
    let error = import_indexed(one, two, map, false).await.expect_err("two of them");
    let told = "tensor `b` is in `one.safetensors` and in `two.safetensors`";
    assert!(error.kind() == ErrorKind::Invalid && error.message().contains(told), "{error}");
    let many: Vec<String> = (0..5).map(|number| format!("x{number}")).collect();
    let many: Vec<(&str, &[u64])> = many.iter().map(|name| (name.as_str(), &[1u64] as &[u64])).collect();
    let (_, warnings) =
        import_indexed(&many, &[], json!({"x0": "one.safetensors"}), false).await.expect("import");
    assert!(warnings[0].contains("`x3` of `one.safetensors` and 1 more;"), "{warnings:?}");
}

/// The index's files were read, and transformers loads the other one.
#[tokio::test]
async fn of_a_file_and_an_index_the_file_is_read() {
    let map = json!({"a": "one.safetensors", "b": "one.safetensors"});
    let one: &Shapes<'_> = &[("a", &[1]), ("b", &[2])];
    let (tensors, warnings) = import_indexed(one, &[], map, true).await.expect("import");
    assert_eq!(tensors, [("a".to_owned(), vec![9])]);
    assert!(warnings.len() == 1 && warnings[0].contains("the first alone is read"), "{warnings:?}");
    // An index of that file says the same.
    let (tensors, warnings) = import_indexed(&[], &[], json!({"a": WHOLE}), true).await.expect("import");
    assert_eq!((tensors, warnings), (vec![("a".to_owned(), vec![9])], Vec::new()));
    let error = import_indexed(&[], &[], json!({"b": WHOLE}), true).await.expect_err("another's index");
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
}
