//! `forebay ckpt convert`: models between Hugging Face directories and steps, on folders and on a mount.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use forebay_tests::s3::Server;
use forebay_tests::{Forebay, Mount, Outcome, Scratch, require_fuse};
use futures::TryStreamExt;
use serde_json::{Value, json};

fn ckpt(scratch: &Scratch, args: &[&str]) -> Outcome {
    Forebay::new(&scratch.folder("home"), [&["ckpt"], args].concat()).run()
}

#[track_caller]
fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// A model of one file: `count` tensors of 1,024 rows of 1,024 bytes.
fn model(folder: &Path, count: usize) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for index in 0..count {
        let start = data.len();
        data.extend((0..1 << 20).map(|at: usize| (at / 13 + at / 5003 + 31 * index) as u8));
        let entry = json!({"dtype": "U8", "shape": [1024, 1024], "data_offsets": [start, data.len()]});
        header.insert(format!("layers.{index:02}"), entry);
    }
    let header = Value::from(header).to_string();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(folder.join("model.safetensors"), bytes))
        .expect("write");
}

/// The bytes of a model's tensors, behind the header.
fn tensors(path: &Path) -> Vec<u8> {
    let bytes = fs::read(path).expect("a model");
    let header = u64::from_le_bytes(*bytes.first_chunk().expect("a length")) as usize;
    bytes[8 + header..].to_vec()
}

/// What trainings and this write has no settings file: the environment names the class.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_in_a_bucket_gets_the_storage_class_of_the_environment() {
    let (scratch, server) = (Scratch::new(), Server::shared());
    let (hub, bucket) = (scratch.join("hub"), server.bucket("run").await);
    model(&hub, 9);
    let variables = [server.envs(), vec![("AWS_STORAGE_CLASS".to_owned(), "INTELLIGENT_TIERING".to_owned())]];
    let words = ["ckpt", "convert", &format!("hf:{}", hub.display()), &format!("{}@7", bucket.url())];
    Forebay::new(&scratch.folder("home"), words).envs(&variables.concat()).run().succeeded();
    let keys: Vec<_> = bucket.list("").map_ok(|object| object.key).try_collect().await.expect("a listing");
    assert!(!keys.is_empty());
    for key in keys {
        let class = server.storage_class(&format!("{}/run/{}", bucket.url().bucket, key.as_str()));
        assert_eq!(class.as_deref(), Some("INTELLIGENT_TIERING"), "{key}");
    }
}

#[test]
fn models_go_both_ways_and_paths_are_places() {
    let scratch = Scratch::new();
    let (hub, run, out) = (scratch.join("hub"), scratch.join("run"), scratch.join("out"));
    model(&hub, 3);
    let [from, place, to] = [&hub, &run, &out].map(|path| path.display().to_string());
    let saved =
        ckpt(&scratch, &["convert", &format!("hf:{from}"), &format!("{place}@7"), "--json"]).succeeded();
    assert_eq!(parse(&saved), json!({"step": 7, "tensors": 3, "bytes": 3 << 20}));
    // A path is as good as a URL.
    let listed = parse(&ckpt(&scratch, &["ls", &place, "--json"]).succeeded());
    assert_eq!(listed["steps"][0]["step"], json!(7));
    ckpt(&scratch, &["verify", &place]).succeeded();
    let words = ["convert", &place, &format!("hf:{to}"), "--max-shard-size", "2MiB", "--json"];
    let written = parse(&ckpt(&scratch, &words).succeeded());
    let files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let expected = json!({
        "files": files, "tensors": 3, "bytes": 3 << 20, "shared_bytes": 0, "streamed": [], "differing": []
    });
    assert_eq!(written, expected);
    let found = [tensors(&out.join(files[0])), tensors(&out.join(files[1]))].concat();
    assert!(found == tensors(&hub.join("model.safetensors")), "every byte is back");
    let index = parse(&fs::read_to_string(out.join("model.safetensors.index.json")).expect("the index"));
    assert_eq!(index["weight_map"]["layers.02"], json!(files[1]));
    assert_eq!(index["metadata"]["total_size"], json!(3 << 20));
    let again =
        ckpt(&scratch, &["convert", &format!("hf:{to}"), &format!("{place}@8"), "--part", "a.b"]).succeeded();
    assert!(again.contains("3.00 MiB"), "{again}");
    ckpt(&scratch, &["convert", &place, &format!("hf:{to}")])
        .failed_with("`model` is not among `a`", "--part");
}

#[test]
fn what_cannot_be_converted_is_told() {
    let scratch = Scratch::new();
    let (hub, place) = (scratch.join("hub"), scratch.join("run").display().to_string());
    model(&hub, 1);
    let from = format!("hf:{}", hub.display());
    ckpt(&scratch, &["convert", &from, &place]).succeeded();
    let convert =
        |from: &str, to: &str, more: &[&str]| ckpt(&scratch, &[&["convert", from, to], more].concat());
    convert(&place, "other", &[]).failed_with("SOURCE and TARGET are of one kind", "hf:./model");
    convert(&format!("{place}@9"), "hf:/nowhere", &[]).failed_with("no step 9", "the last 0");
    convert(&place, &from, &[]).failed_with("holds a model already", "another directory");
    convert(&place, "pt:model.pt", &[]).failed_with("pt:FILE is a SOURCE only", "torch.save(");
    let other = scratch.join("other").display().to_string();
    // The step would be the newest of a run that goes on, and end whoever saves there.
    for target in [place.clone(), format!("{place}@0")] {
        convert(&from, &target, &[])
            .failed_with("holds step 0, which would not be the newest any more", "@1 comes after");
        convert("pt:x", &target, &[]).failed_with("which would not be the newest any more", "--force");
    }
    convert(&from, &format!("{place}@1"), &[]).succeeded();
    convert(&from, &format!("{place}@0"), &["--force"]).succeeded();
    for wrong in ["@abc", "@-1", "@", "@99999999999999999999999"] {
        convert(&from, &format!("{place}{wrong}"), &[]).failed_with("names no step", "@500 behind the URL");
        ckpt(&scratch, &["show", &format!("{place}{wrong}")]).failed_with("names no step", "@500");
    }
    let listed = ckpt(&scratch, &["ls", &format!("{}@7", scratch.folder("run@7").display())]);
    assert!(listed.stderr.contains("takes no step behind the URL") || listed.code != Some(0), "{listed}");
    let place = other;
    convert("pt:x", &place, &["--python", "/no/such/python"]).failed_with("/no/such/python", "--python");
    convert(&place, "hf:s3://bucket/out", &[]).failed_with("is no directory", "mount the bucket");
    convert("dcp:x", &place, &["--python", "/no/such/python"]).failed_with("/no/such/python", "--python");
    convert("dcp:x", &place, &["--python", "false"])
        .failed_with("`false` has no package forebay", "--python");
    let nothing = scratch.folder("nothing").display().to_string();
    convert(&format!("hf:{nothing}"), &place, &[])
        .failed_with("holds no `model.safetensors`", "a directory with a model");
}

#[test]
fn what_the_index_does_not_say_is_warned_of() {
    let scratch = Scratch::new();
    let (hub, place) = (scratch.join("hub"), scratch.join("run").display().to_string());
    model(&hub, 2);
    let from = format!("hf:{}", hub.display());
    let convert = |file: &str, name: &str| {
        let index = json!({"metadata": {}, "weight_map": {name: file}}).to_string();
        fs::write(hub.join("model.safetensors.index.json"), index).expect("write");
        ckpt(&scratch, &["convert", &from, &place, "--force"])
    };
    convert("model.safetensors", "lm_head").failed_with("`lm_head` in `model.safetensors`", "anew");
    assert!(!scratch.join("run/steps").exists(), "no step was committed");
    let told = convert("other.safetensors", "layers.00");
    assert!(told.stderr.contains("warning: ") && told.stderr.contains("the first alone is read"), "{told}");
    assert!(told.succeeded().contains("2.00 MiB"));
    let told = convert("model.safetensors", "layers.00");
    assert!(told.stderr.contains("in the step nevertheless: `layers.01`"), "{told}");
    told.succeeded();
}

/// Bytes that went to and from the store, by `forebay status`.
fn moved_bytes(scratch: &Scratch) -> u64 {
    let shown = parse(&Forebay::new(&scratch.folder("home"), ["status", "--json"]).run().succeeded());
    let operations = shown["mounts"][0]["store"]["operations"].as_array().expect("operations").clone();
    operations.iter().map(|kind| kind[1]["bytes"].as_u64().expect("a count")).sum()
}

/// Waits until all files below `name` are objects at their own paths, as they become behind their close.
fn wait_for_objects(folder: &Path, bucket: &Path, name: &str) {
    let begun = Instant::now();
    let is_object = |file: &Path, size: u64| {
        let object = bucket.join(file.strip_prefix(folder).expect("a path below it"));
        fs::metadata(object).is_ok_and(|object| object.len() == size)
    };
    let mut left = vec![folder.join(name)];
    while let Some(path) = left.pop() {
        let found = fs::metadata(&path).expect("it is there");
        if found.is_dir() {
            left.extend(
                fs::read_dir(&path).expect("a directory").map(|entry| entry.expect("an entry").path()),
            );
            continue;
        }
        while !is_object(&path, found.len()) {
            assert!(begun.elapsed() < Duration::from_secs(60), "{} is no object", path.display());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A model on a mount is written as a step there and exported there: bytes are shared, none is moved.
#[test]
fn an_export_on_a_mount_shares_the_steps_bytes() {
    if !require_fuse("an_export_on_a_mount_shares_the_steps_bytes") {
        return;
    }
    let scratch = Scratch::new();
    let (bucket, folder, hub) = (scratch.folder("bucket"), scratch.join("mnt"), scratch.join("hub"));
    model(&hub, 64);
    let url = format!("file://{}", bucket.display());
    let mount = Mount::new(&scratch.folder("home"), &url, &folder, &[], &[]);
    let (place, out) = (folder.join("run").display().to_string(), folder.join("out"));
    ckpt(&scratch, &["convert", &format!("hf:{}", hub.display()), &place]).succeeded();
    wait_for_objects(&folder, &bucket, "run");
    let before = moved_bytes(&scratch);
    let to = format!("hf:{}", out.display());
    let written = parse(&ckpt(&scratch, &["convert", &place, &to, "--json"]).succeeded());
    assert_eq!((&written["shared_bytes"], &written["streamed"]), (&json!(64 << 20), &json!([])), "{written}");
    wait_for_objects(&folder, &bucket, "out");
    let moved = moved_bytes(&scratch) - before;
    // Once it is closed the mount makes it an object of its own inside the store; its first part, with the header, passes
    // through the host: 5 MiB, read as the two blocks that hold them.
    assert!(moved < 14 << 20, "{moved} bytes were moved for a model of 64 MiB");
    assert!(tensors(&out.join("model.safetensors")) == tensors(&hub.join("model.safetensors")));
    drop(mount);
}
