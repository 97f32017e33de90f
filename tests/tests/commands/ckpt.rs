//! `forebay ckpt`: steps that are listed, shown, compared, verified, pinned and deleted.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use bytes::Bytes;
use forebay_ckpt::catalog::{Start, StepName, begin_run, commit, newest_run};
use forebay_ckpt::dtype::Dtype;
use forebay_ckpt::manifest::{Checksum, Identity, Manifest, Shard, ShardKey, Slice, SliceKind, Tensor};
use forebay_ckpt::region::Region;
use forebay_ckpt::shard::{ShardLayout, TensorSpec};
use forebay_core::crc32c;
use forebay_io::object::{Bucket, BucketUrl, Condition, StoreSettings};
use forebay_tests::process::start;
use forebay_tests::{Forebay, Scratch};
use serde_json::{Value, json};

use super::{forebay, parse, url};

/// Steps 10 and 20, each one shard with the tensors `embed` and `head.weight`; gives the folder.
async fn checkpoints(scratch: &Scratch) -> PathBuf {
    let folder = scratch.folder("run");
    let url: BucketUrl = url(&folder).parse().expect("URL");
    let bucket = Bucket::open(&url, &StoreSettings::default()).await.expect("a bucket");
    let start = Start { nonce: "0123456789abcdef".repeat(2), host: "h".into(), pid: 1, started_ms: 0 };
    let run = begin_run(&bucket, start).await.expect("a run");
    for step in [10, 20] {
        let dtype = Dtype::named("float32").expect("a type");
        let spec = |name: &str, shape: &[u64]| TensorSpec::whole(name, dtype, shape.to_vec());
        let specs = [spec("embed", &[16, 64]), spec("head.weight", &[100])];
        let layout = ShardLayout::of(&specs).expect("a layout");
        let mut file = layout.header.clone();
        file.resize(layout.size as usize, step as u8);
        let tensors = specs.iter().zip(&layout.ranges).map(|(spec, range)| {
            let bytes = &file[range.start as usize..range.end as usize];
            let (offsets, lengths) = (vec![0; spec.shape.len()], spec.shape.clone());
            let (crc32c, blake3) = (Checksum(crc32c(bytes)), Identity::of(bytes));
            let (start, end) = (range.start, range.end);
            let slice =
                Slice { kind: SliceKind::Box, offsets, lengths, shard: 0, start, end, crc32c, blake3 };
            let shape = spec.shape.clone();
            Tensor { name: spec.name.clone(), dtype: "float32".into(), shape, slices: vec![slice] }
        });
        let (attempt, name) = (run.attempt().to_owned(), ShardKey::layout_of(&layout.header));
        let key =
            ShardKey { step, incarnation: run.incarnation, attempt, rank: 0, save: 1, layout: name }.object();
        let shard = Shard {
            key: key.as_str().into(),
            size: layout.size,
            header: layout.header.len() as u64,
            crc32c: Checksum(crc32c(&file)),
            rank: 0,
            step,
        };
        let manifest = Manifest {
            commit: run.run.clone(),
            run: run.run.clone(),
            incarnation: run.incarnation,
            step,
            created_ms: 0,
            world_size: 1,
            parents: Vec::new(),
            shards: vec![shard],
            tensors: tensors.collect(),
            extras: Vec::new(),
        };
        bucket.put(&key, Bytes::from(file.clone()), Condition::Always).await.expect("put");
        commit(&bucket, &run, &manifest).await.expect("commit");
    }
    folder
}

/// The shard file of a step.
fn shard_of(scratch: &Scratch, source: &str, step: &str) -> (PathBuf, Value) {
    let manifest = parse(&forebay(scratch, &["ckpt", "show", source, step, "--json"]).succeeded());
    let key = manifest["shards"][0]["key"].as_str().expect("a key").to_owned();
    (scratch.join("run").join(key), manifest)
}

#[tokio::test]
async fn checkpoints_are_listed_shown_and_verified() {
    let scratch = Scratch::new();
    let source = url(&checkpoints(&scratch).await);
    let run = |args: &[&str]| forebay(&scratch, &[&["ckpt"], args].concat());
    let listed = parse(&run(&["ls", &source, "--json"]).succeeded());
    let steps: Vec<_> = listed["steps"].as_array().expect("steps").iter().map(|step| &step["step"]).collect();
    assert_eq!(steps, [10, 20]);
    assert_eq!(run(&["ls", &source]).succeeded().lines().count(), 3);
    let shown = run(&["show", &source, "20"]).succeeded();
    assert!(shown.contains("head.weight") && shown.contains("[16, 64]"), "{shown}");
    for same in [&source, &format!("{source}@20")] {
        assert_eq!(run(&["show", same]).succeeded(), shown);
    }
    run(&["show", &source, "30"]).failed_with("no step 30", "the last 20");
    for line in
        [&["show", &format!("{source}@10"), "20"][..], &["verify", &format!("{source}@10"), "--step", "20"]]
    {
        run(line).failed_with("run@10` names a step, and 20 is another", "either");
    }
    run(&["show", &format!("{source}@10/"), "20"]).failed_with("run@10: No such file", "check the path");
    let report = parse(&run(&["verify", &format!("{source}@20"), "--json"]).succeeded());
    assert_eq!(report["steps"], json!(1), "{report}");
    let report = parse(&run(&["verify", &source, "--json"]).succeeded());
    assert_eq!((&report["steps"], &report["findings"]), (&json!(2), &json!([])), "{report}");
    let sizes: u64 = ["10", "20"]
        .map(|step| fs::metadata(shard_of(&scratch, &source, step).0).expect("a shard").len())
        .iter()
        .sum();
    assert_eq!(report["read_bytes"], json!(sizes), "every byte is read");
}

#[tokio::test]
async fn steps_are_pinned_and_deleted_and_garbage_goes() {
    let scratch = Scratch::new();
    let folder = checkpoints(&scratch).await;
    let source = url(&folder);
    let run = |args: &[&str]| forebay(&scratch, &[&["ckpt"], args].concat());
    let at = |step: &str| format!("{source}@{step}");
    run(&["pin", &source, "30"]).failed_with("no step 30", "the last 20");
    run(&["pin", &at("30")]).failed_with("no step 30", "the last 20");
    // As `show` and `verify` take it, or beside the URL.
    for pinned in [vec!["pin", &source, "10"], vec!["pin", &at("10")], vec!["pin", &at("10.1")]] {
        let told = parse(&run(&[&pinned[..], &["--json"]].concat()).succeeded());
        assert_eq!(told, json!({"step": 10, "pinned": true}), "{pinned:?}");
    }
    for command in ["pin", "unpin", "rm"] {
        run(&[command, &source]).failed_with("names no step", "@500");
        run(&[command, &at("ten")]).failed_with("`ten` names no step", "@500");
    }
    for command in ["pin", "unpin", "rm"] {
        run(&[command, &at("10"), "20"]).failed_with("run@10` names a step, and 20 is another", "either");
    }
    // What is for a whole run takes none.
    for command in ["ls", "watch", "gc"] {
        let outcome = run(&[command, &at("10")]);
        outcome.failed_with("run@10` names a step, and this command is for all", "leave `@10` out");
        assert_eq!(outcome.code, Some(1), "{outcome}");
    }
    run(&["rm", &source, "20", "10"]).failed_with("step 10 is pinned", "unpin");
    run(&["rm", &at("10")]).failed_with("step 10 is pinned", "unpin");
    let listed = parse(&run(&["ls", &source, "--json"]).succeeded());
    assert_eq!([&listed["steps"][0]["pinned"], &listed["steps"][1]["pinned"]], [&json!(true), &json!(false)]);
    assert!(run(&["ls", &source]).succeeded().contains("pinned"));
    let shown = |step: &str| parse(&run(&["show", &format!("{source}@{step}"), "--json"]).succeeded());
    assert_eq!(shown("10.1"), shown("10"));
    run(&["show", &source, "10.2"]).failed_with("no step 10 of start 2", "2 steps are committed");
    run(&["unpin", &at("10.2")]).failed_with("no step 10 of start 2", "2 steps are committed");
    run(&["unpin", &at("10")]).succeeded();
    run(&["unpin", &source, "10"]).succeeded();
    run(&["unpin", &source, "11"]).failed_with("no step 11", "the last");
    run(&["rm", &at("10.1")])
        .failed_with("step 10 of start 1: a step is deleted as every start", "not pinned");
    let removed = parse(&run(&["rm", &at("10"), "--json"]).succeeded());
    assert_eq!(removed, json!({"manifests": 1, "shards": 1}));
    run(&["verify", &source]).succeeded();

    let orphan = format!("shards/{:020}/0000000001-00000000/000000-000009-00000000.safetensors", 30);
    let path = folder.join(&orphan);
    fs::create_dir_all(path.parent().expect("a folder"))
        .and_then(|()| fs::write(path, [1; 500]))
        .expect("write");
    let gc = |args: &[&str]| parse(&run(&[&["gc", &source, "--json"], args].concat()).succeeded());
    assert_eq!(gc(&[])["shards"], json!([]), "it may belong to a save under way");
    let past = std::time::SystemTime::now() - std::time::Duration::from_secs(7200);
    fs::File::open(folder.join(&orphan)).and_then(|file| file.set_modified(past)).expect("age");
    assert_eq!(gc(&["--older-than", "1", "--dry-run"])["shards"], json!([orphan]));
    let done = gc(&["--older-than", "1"]);
    assert_eq!(
        (&done["shards"], &done["bytes"], &done["deleted"]),
        (&json!([orphan]), &json!(500), &json!(true))
    );
    assert!(!folder.join(&orphan).exists());
    run(&["gc", &source, "--older-than", "0"]).failed_with("may belong to a save under way", "larger age");
    run(&["verify", &source]).succeeded();
}

#[tokio::test]
async fn steps_that_refer_to_earlier_shards_are_shown_and_outlive_them() {
    let scratch = Scratch::new();
    let folder = checkpoints(&scratch).await;
    let source = url(&folder);
    let bucket = Bucket::open(&source.parse::<BucketUrl>().expect("a URL"), &StoreSettings::default())
        .await
        .expect("open");
    let run = newest_run(&bucket).await.expect("runs").expect("a run");
    let mut manifest = forebay_ckpt::show(&bucket, StepName::from(20)).await.expect("step 20");
    let header = ShardLayout::of(&[]).expect("a layout").header;
    let (attempt, layout) = (run.attempt().to_owned(), ShardKey::layout_of(&header));
    let key = ShardKey { step: 30, incarnation: 1, attempt, rank: 0, save: 1, layout }.object();
    let (size, crc32c) = (header.len() as u64, Checksum(crc32c(&header)));
    bucket.put(&key, Bytes::from(header), Condition::Always).await.expect("put");
    let own = Shard { key: key.as_str().into(), size, header: size, crc32c, rank: 0, step: 30 };
    manifest.shards.push(own);
    (manifest.step, manifest.parents) = (30, vec![20]);
    commit(&bucket, &run, &manifest).await.expect("commit");

    let run = |args: &[&str]| forebay(&scratch, &[&["ckpt"], args].concat());
    let shown = run(&["show", &source, "30"]).succeeded();
    assert!(shown.contains("shards of others  1, 8.39 KiB, of step 20"), "{shown}");
    assert!(shown.contains("shards            1, 4.00 KiB"), "{shown}");
    let same = parse(&run(&["diff", &format!("{source}@20"), "@30", "--json"]).succeeded());
    assert_eq!(same["equal"], json!(true));
    let read = parse(&run(&["verify", &source, "--json"]).succeeded());
    assert_eq!(read["read_bytes"], json!(2 * 8592 + 4096), "what two steps need is read once: {read}");
    let removed = parse(&run(&["rm", &source, "20", "--json"]).succeeded());
    assert_eq!(removed, json!({"manifests": 1, "shards": 0}));
    run(&["verify", &source]).succeeded();
    let removed = parse(&run(&["rm", &source, "30", "--json"]).succeeded());
    assert_eq!(removed, json!({"manifests": 1, "shards": 2}));
}

/// Stores a rank's file of these parts of tensors and adds it to a manifest.
async fn store_part(
    bucket: &Bucket,
    attempt: &str,
    manifest: &mut Manifest,
    rank: u32,
    specs: &[TensorSpec],
) {
    let layout = ShardLayout::of(specs).expect("a layout");
    let mut file = layout.header.clone();
    file.resize(layout.size as usize, rank as u8);
    for (spec, range) in specs.iter().zip(&layout.ranges) {
        let bytes = &file[range.start as usize..range.end as usize];
        let slice = Slice {
            kind: spec.region.kind,
            offsets: spec.region.offsets.clone(),
            lengths: spec.region.lengths.clone(),
            shard: manifest.shards.len() as u32,
            start: range.start,
            end: range.end,
            crc32c: Checksum(crc32c(bytes)),
            blake3: Identity::of(bytes),
        };
        let (name, dtype, shape) = (spec.name.clone(), spec.dtype.name.to_owned(), spec.shape.clone());
        match manifest.tensors.iter_mut().find(|tensor| tensor.name == name) {
            Some(tensor) => tensor.slices.push(slice),
            None => manifest.tensors.push(Tensor { name, dtype, shape, slices: vec![slice] }),
        }
    }
    let (step, layout_name) = (manifest.step, ShardKey::layout_of(&layout.header));
    let key = ShardKey { step, incarnation: 1, attempt: attempt.into(), rank, save: 1, layout: layout_name };
    let (header, crc32c) = (layout.header.len() as u64, Checksum(crc32c(&file)));
    let key = key.object();
    manifest.shards.push(Shard { key: key.as_str().into(), size: layout.size, header, crc32c, rank, step });
    bucket.put(&key, Bytes::from(file), Condition::Always).await.expect("put");
}

/// Step 7 of two ranks, and step 8, which refers to it; gives the manifest of the latter.
async fn steps_of_two_ranks(source: &str) -> Manifest {
    let place: BucketUrl = source.parse().expect("a URL");
    let bucket = Bucket::open(&place, &StoreSettings::default()).await.expect("a bucket");
    let start = Start { nonce: "0123456789abcdef".repeat(2), host: "h".into(), pid: 1, started_ms: 0 };
    let run = begin_run(&bucket, start).await.expect("a run");
    let mut manifest = Manifest {
        commit: "1".repeat(32),
        run: run.run.clone(),
        incarnation: run.incarnation,
        step: 7,
        created_ms: 0,
        world_size: 2,
        parents: Vec::new(),
        shards: Vec::new(),
        tensors: Vec::new(),
        extras: Vec::new(),
    };
    let spec = |name: &str, shape: &[u64], kind, offsets: &[u64], lengths: &[u64]| TensorSpec {
        name: name.into(),
        dtype: Dtype::named("float32").expect("a type"),
        shape: shape.into(),
        region: Region { kind, offsets: offsets.into(), lengths: lengths.into() },
    };
    let (flat, boxed) = (SliceKind::Flat, SliceKind::Box);
    let first = [
        spec("alike", &[100], flat, &[0], &[60]),
        spec("rows", &[8, 4], boxed, &[0, 0], &[4, 4]),
        spec("columns", &[2, 6], boxed, &[0, 0], &[2, 3]),
    ];
    let second = [
        spec("alike", &[100], flat, &[60], &[40]),
        spec("rows", &[8, 4], boxed, &[4, 0], &[4, 4]),
        spec("columns", &[2, 6], boxed, &[0, 3], &[2, 3]),
        spec("own@1", &[5], boxed, &[0], &[5]),
    ];
    store_part(&bucket, run.attempt(), &mut manifest, 0, &first).await;
    store_part(&bucket, run.attempt(), &mut manifest, 1, &second).await;
    commit(&bucket, &run, &manifest).await.expect("commit");
    // The next step has only what rank 1 wrote anew: a tensor of its own, and its rows of another.
    let mut next = Manifest { commit: "2".repeat(32), step: 8, parents: vec![7], ..manifest.clone() };
    for tensor in &mut next.tensors {
        tensor.slices.retain(|slice| slice.shard == 0 || !["own@1", "rows"].contains(&tensor.name.as_str()));
    }
    next.tensors.retain(|tensor| tensor.name != "own@1");
    store_part(&bucket, run.attempt(), &mut next, 0, &[]).await;
    store_part(&bucket, run.attempt(), &mut next, 1, &[second[1].clone(), second[3].clone()]).await;
    commit(&bucket, &run, &next).await.expect("commit");
    next
}

#[tokio::test]
async fn a_step_of_two_ranks_is_shown_with_its_placement_and_the_bytes_of_each() {
    let scratch = Scratch::new();
    let source = url(&scratch.folder("run"));
    let next = steps_of_two_ranks(&source).await;
    let run = |args: &[&str]| forebay(&scratch, &[&["ckpt", "show", &source], args].concat()).succeeded();
    let tables = |shown: &str| shown.split_once("\n\n").expect("facts, and the rest").1.to_owned();
    let expected = "\
RANK  STORED  OF EARLIER STEPS
0     328 B   0 B
1     268 B   0 B

TENSOR   TYPE     SHAPE   SIZE   PLACEMENT
alike    float32  [100]   400 B  replicated, split over ranks 0-1
rows     float32  [8, 4]  128 B  ranks 0-1, rows
columns  float32  [2, 6]  48 B   ranks 0-1, columns
own@1    float32  [5]     20 B   rank 1
";
    assert_eq!(tables(&run(&["7"])), expected);
    let expected = "\
RANK  STORED  OF EARLIER STEPS
0     0 B     328 B
1     84 B    184 B

TENSOR   TYPE     SHAPE   SIZE   PLACEMENT
alike    float32  [100]   400 B  replicated, split over ranks 0-1; all of step 7
rows     float32  [8, 4]  128 B  ranks 0-1, rows; 64 B of step 7
columns  float32  [2, 6]  48 B   ranks 0-1, columns; all of step 7
own@1    float32  [5]     20 B   rank 1
";
    assert_eq!(tables(&run(&["8"])), expected);
    let mut shown = parse(&run(&["8", "--json"]));
    let placement = shown.as_object_mut().and_then(|fields| fields.remove("placement")).expect("it is told");
    assert_eq!(shown, serde_json::to_value(&next).expect("JSON"), "the rest is the manifest");
    let ranks = [
        json!({ "rank": 0, "stored": 0, "earlier": 328 }),
        json!({ "rank": 1, "stored": 84, "earlier": 184 }),
    ];
    assert_eq!(placement["ranks"], json!(ranks));
    let rows = json!({
        "name": "rows", "bytes": 128, "ranks": [0, 1], "kind": "box", "dimensions": [0],
        "earlier": [{ "step": 7, "bytes": 64 }],
    });
    assert_eq!(placement["tensors"][1], rows);
}

#[tokio::test]
async fn steps_are_compared_and_waited_for() {
    let scratch = Scratch::new();
    let folder = checkpoints(&scratch).await;
    let source = url(&folder);
    let run = |args: &[&str]| forebay(&scratch, &[&["ckpt"], args].concat());
    let before = format!("{source}@10");
    let found = parse(&run(&["diff", &before, &source, "--json"]).succeeded());
    let names: Vec<_> =
        found["tensors"].as_array().expect("tensors").iter().map(|tensor| &tensor["name"]).collect();
    assert_eq!(names, ["embed", "head.weight"], "{found}");
    assert_eq!((&found["before"], &found["after"], &found["equal"]), (&json!(10), &json!(20), &json!(false)));
    let side = json!({"dtype": "float32", "shape": [16, 64], "bytes": 4096});
    assert_eq!((&found["tensors"][0]["before"], &found["tensors"][0]["change"]), (&side, &json!("changed")));
    let shown = run(&["diff", &before, "@20"]).succeeded();
    assert!(shown.contains("changed  embed") && shown.contains("step 10 to 20"), "{shown}");
    let same = parse(&run(&["diff", &before, "@10", "--json"]).succeeded());
    assert_eq!((&same["equal"], &same["same"], &same["same_bytes"]), (&json!(true), &json!(2), &json!(4496)));
    run(&["diff", &before, "@30"]).failed_with("no step 30", "the last 20");
    for after in ["20", "20.1"] {
        assert_eq!(run(&["diff", &before, after]).succeeded(), shown);
    }

    let watched = run(&["watch", &source, "--after", "10", "--once", "--json"]).succeeded();
    assert_eq!(parse(&watched)["step"], json!(20), "{watched}");
    run(&["watch", &source, "--timeout", "0"]).failed_with("no step was committed", "--timeout");
    // A directory that the first save has not made yet has no steps, and the first is told.
    let early = scratch.join("early").display().to_string();
    let watch =
        |words: &[&str]| Forebay::new(scratch.path(), [&["ckpt", "watch", &early], words].concat()).run();
    watch(&["--timeout", "0"]).failed_with("no step was committed", "--timeout");
    let watched = std::thread::scope(|threads| {
        // Should it begin after the directory is there, the step is told as well.
        let words = ["--after", "10", "--once", "--timeout", "60", "--interval", "1", "--json"];
        let watching = threads.spawn(move || watch(&words));
        std::thread::sleep(std::time::Duration::from_millis(300));
        fs::rename(&folder, &early).expect("move");
        let watched = watching.join().expect("it ends").succeeded();
        fs::rename(&early, &folder).expect("move back");
        watched
    });
    assert!(watched.lines().any(|line| parse(line)["step"] == json!(20)), "{watched}");
    // A step that comes while it waits.
    let parked = scratch.join("parked");
    fs::rename(folder.join("steps").join(format!("{:020}", 20)), &parked).expect("move");
    let back = folder.join("steps").join(format!("{:020}", 20));
    let mover = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(700));
        fs::rename(parked, back).expect("move");
    });
    let watched =
        run(&["watch", &source, "--after", "10", "--once", "--timeout", "60", "--interval", "1", "--json"])
            .succeeded();
    mover.join().expect("the mover");
    assert_eq!(watched.lines().map(|line| parse(line)["step"].clone()).collect::<Vec<_>>(), [json!(20)]);
}

#[tokio::test]
async fn what_is_damaged_in_a_checkpoint_is_named() {
    let scratch = Scratch::new();
    let folder = checkpoints(&scratch).await;
    let source = url(&folder);
    let verify = |args: &[&str]| forebay(&scratch, &[&["ckpt", "verify", &source], args].concat());
    let (shard, manifest) = shard_of(&scratch, &source, "20");
    let key = manifest["shards"][0]["key"].as_str().expect("a key");

    // A flipped bit in the middle of one tensor.
    let embed =
        manifest["tensors"].as_array().expect("tensors").iter().find(|tensor| tensor["name"] == "embed");
    let at = embed.expect("the tensor")["slices"][0]["start"].as_u64().expect("an offset") + 1000;
    let file = fs::File::options().read(true).write(true).open(&shard).expect("a shard");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("read");
    file.write_all_at(&[byte[0] ^ 4], at).expect("write");
    let outcome = verify(&[]);
    outcome.failed_with("1 faults", "restore another step");
    assert_eq!(outcome.code, Some(1), "{outcome}");
    for word in ["step 20", key, "tensor `embed`"] {
        assert!(outcome.stdout.contains(word), "{word}: {outcome}");
    }
    verify(&["--step", "10"]).succeeded();
    // Who reads what is told may have enough: it was no fault then.
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let mut command = Command::new(Forebay::binary());
    command.args(["ckpt", "verify", &source]).stdout(writer).stderr(Stdio::null());
    let unread = start(&mut command).and_then(|mut unread| unread.wait()).expect("it runs");
    assert_eq!(unread.code(), Some(1));
    file.write_all_at(&byte, at).expect("write");
    verify(&[]).succeeded();

    // A shard that is gone.
    fs::remove_file(&shard).expect("remove");
    let report = parse(&verify(&["--json"]).stdout);
    let expected = json!([{ "step": 20, "object": key, "fact": "is missing" }]);
    assert_eq!(report["findings"], expected, "{report}");

    // A damaged manifest, then none at all.
    let listed = parse(&forebay(&scratch, &["ckpt", "ls", &source, "--json"]).succeeded());
    let manifest = folder.join(listed["steps"][0]["manifest"].as_str().expect("a key"));
    let text = fs::read_to_string(&manifest).expect("a manifest");
    fs::write(&manifest, text.replace("embed", "umbed")).expect("write");
    let outcome = verify(&["--step", "10"]);
    outcome.failed_with("1 faults", "restore another step");
    assert!(outcome.stdout.contains("step 10"), "{outcome}");
    fs::remove_dir_all(folder.join("steps")).expect("remove");
    verify(&[]).failed_with("holds no committed step", "saved to");
    verify(&["--step", "10"]).failed_with("no step 10", "no committed step");
}
