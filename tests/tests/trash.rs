//! Deleting and bringing back, as a user does it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use forebay_core::ObjectKey;
use forebay_io::object::Condition;
use forebay_tests::s3::Server;
use forebay_tests::{Forebay, Mount, Outcome, Scratch, TestBucket, require_fuse, shell};
use serde_json::Value;

/// Longest that the mover may take to bring the bucket up to date: it is woken at once.
const DEADLINE: Duration = Duration::from_secs(30);

fn forebay(home: &Path, words: &[&str]) -> Outcome {
    Forebay::new(home, words).run()
}

/// Waits until there is an object at `key`, or none.
async fn wait_for(bucket: &TestBucket, key: &str, is_there: bool) {
    let started = Instant::now();
    while bucket.has(key).await != is_there {
        assert!(started.elapsed() < DEADLINE, "not in time: {key} is there: {is_there}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Lines of JSON.
#[track_caller]
fn lines(text: &str) -> Vec<Value> {
    let parse = |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    text.lines().map(parse).collect()
}

/// Promise S41: What was deleted is gone from its path in the bucket, too, and a new file there destroys nothing: the
/// bytes in the trash lie under `.forebay/blobs/`, where the store copied them.
/// Promise S42: `forebay trash restore` brings back a file, or all that was deleted below a directory with the directory
/// itself; where a name is taken by now it changes nothing and says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_deleted_is_gone_for_others_and_comes_back() {
    if require_fuse("what_was_deleted_is_gone_for_others_and_comes_back") {
        let folder = Scratch::new();
        delete_and_bring_back(&TestBucket::folder(folder.path()).await).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_deleted_on_s3_is_gone_for_others_and_comes_back() {
    if require_fuse("what_was_deleted_on_s3_is_gone_for_others_and_comes_back") {
        delete_and_bring_back(&TestBucket::s3().await).await;
    }
}

async fn delete_and_bring_back(bucket: &TestBucket) {
    let scratch = Scratch::new();
    let (home, folder, source) = (scratch.folder("home"), scratch.join("mnt"), bucket.source());
    let plain = ObjectKey::new("plain");
    bucket.put(&plain, "of another tool".into(), Condition::Always).await.expect("written");
    let mut mount = Mount::new(&home, &source, &folder, &["--trash", "1d", "--take-over"], &bucket.envs());
    let at = |path: &str| folder.join(path).display().to_string();
    shell(
        &folder,
        "mkdir -p d/e && echo deep > d/e/f && chmod 750 d/e && chmod 600 d/e/f && python3 -c \"import os; os.setxattr('d/e/f', 'user.x', b'y')\" \
         && echo replaced > d/x && echo new > y && mv y d/x && rm -r d && rm plain",
    )
    .succeeded();
    wait_for(bucket, "plain", false).await;
    wait_for(bucket, "d/x", false).await;
    fs::write(folder.join("plain"), "another").expect("written");
    assert_eq!(bucket.text("plain").await, "another");

    let listed = lines(&forebay(&home, &["trash", "ls", &at(""), "--json"]).succeeded());
    let mut paths: Vec<&str> = listed.iter().map(|one| one["path"].as_str().expect("a path")).collect();
    paths.sort_unstable();
    assert_eq!(paths, ["d", "d/e", "d/e/f", "d/x", "d/x", "plain"]);
    let shown = forebay(&home, &["trash", "ls", &at("d/e")]).succeeded();
    assert!(shown.contains("UNTIL") && shown.contains("d/e/f") && shown.lines().count() == 3, "{shown}");

    let taken = forebay(&home, &["trash", "restore", &at("plain")]);
    taken.failed_with("1 not brought back: the path `plain` is taken", "--to");
    assert_eq!(fs::read_to_string(folder.join("plain")).expect("bytes"), "another");
    forebay(&home, &["trash", "restore", &at("plain"), "--to", &at("old")]).succeeded();
    assert_eq!(fs::read_to_string(folder.join("old")).expect("bytes"), "of another tool");
    wait_for(bucket, "old", true).await;
    forebay(&home, &["trash", "restore", &at("nothing")]).failed_with("nothing that was deleted", "trash ls");

    // A killed mount and the loss of its host take nothing out of the trash.
    shell(&folder, "sync -f . ; python3 -c \"import os; os.fsync(os.open('.', os.O_RDONLY))\"").succeeded();
    mount.kill();
    let home = scratch.folder("other-home");
    mount.remount(&home);
    let restored = forebay(&home, &["trash", "restore", &at("d/e"), "--json"]).succeeded();
    assert_eq!(lines(&restored)[0]["files"], 1, "{restored}");
    assert_eq!(fs::read_to_string(folder.join("d/e/f")).expect("bytes"), "deep\n");
    let mode = |path: &str| fs::metadata(folder.join(path)).expect("metadata").permissions().mode() & 0o777;
    assert_eq!((mode("d/e"), mode("d/e/f")), (0o750, 0o600));
    let attribute = "python3 -c \"import os; print(os.getxattr('d/e/f', 'user.x').decode(), end='')\"";
    assert_eq!(shell(&folder, attribute).succeeded(), "y");
    assert!(!folder.join("d/x").exists());

    let replaced = lines(&forebay(&home, &["trash", "ls", &at("d/x"), "--json"]).succeeded());
    let oldest = replaced.iter().min_by_key(|one| one["size"].as_u64().map(std::cmp::Reverse));
    let id = oldest.expect("two of them")["id"].as_str().expect("a name").to_owned();
    forebay(&home, &["trash", "restore", &at("d/x"), "--id", &id]).succeeded();
    assert_eq!(fs::read_to_string(folder.join("d/x")).expect("bytes"), "replaced\n");

    let emptied = lines(&forebay(&home, &["trash", "empty", &at(""), "--json"]).succeeded());
    assert_eq!(
        (emptied[0]["freed"].as_u64(), emptied[0]["busy"].as_u64()),
        (Some(1), Some(0)),
        "{emptied:?}"
    );
    assert_eq!(forebay(&home, &["trash", "ls", &at(""), "--json"]).succeeded(), "");
    mount.unmount();
    Forebay::new(&home, ["fsck", &source]).envs(&bucket.envs()).run().succeeded();
}

/// What was deleted of the whole volume came to paths beside the one that it was to be brought to.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_brought_back_elsewhere_keeps_its_paths() {
    if !require_fuse("what_is_brought_back_elsewhere_keeps_its_paths") {
        return;
    }
    let scratch = Scratch::new();
    let bucket = TestBucket::folder(&scratch.folder("bucket")).await;
    let (home, folder) = (scratch.folder("home"), scratch.join("mnt"));
    let mut mount = Mount::new(&home, &bucket.source(), &folder, &["--trash", "1h"], &[]);
    let at = |path: &str| folder.join(path).display().to_string();
    shell(&folder, "mkdir -p run dir && echo 1 > run/a && echo 2 > b && echo 3 > dir/f && rm -r run b dir/f")
        .succeeded();
    forebay(&home, &["trash", "restore", &at(""), "--to", &at("back")]).succeeded();
    assert_eq!(shell(&folder, "cat back/run/a back/b back/dir/f; ls").succeeded(), "1\n2\n3\nback\ndir\n");
    for (path, to) in [("", "one"), ("back", "two/three")] {
        shell(&folder, "echo 4 > back/new && rm back/new").succeeded();
        let listed = lines(&forebay(&home, &["trash", "ls", &at("back"), "--json"]).succeeded());
        let id = listed[0]["id"].as_str().expect("a name");
        forebay(&home, &["trash", "restore", &at(path), "--id", id, "--to", &at(to)]).succeeded();
        assert_eq!(fs::read_to_string(folder.join(to)).expect("bytes"), "4\n");
    }
    mount.unmount();
}

/// Other tools mark directories by empty objects (`dir/`). What was removed or renamed came back with them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_that_another_tool_marked_is_gone_with_its_marker() {
    if !require_fuse("a_directory_that_another_tool_marked_is_gone_with_its_marker") {
        return;
    }
    let (scratch, server) = (Scratch::new(), Server::start());
    let bucket = server.bucket("a/prefix").await;
    let put = |key: &str| server.put_raw(&format!("{}/a/prefix/{key}", bucket.url().bucket));
    for marker in ["gone/", "gone/below/", "kept/", "moved/", "moved/below/", "moved/empty/", "back/"] {
        put(marker);
    }
    let (home, folder, source) = (scratch.folder("home"), scratch.join("mnt"), bucket.url().to_string());
    let mut mount = Mount::new(&home, &source, &folder, &["--trash", "1d"], &server.envs());
    let at = |path: &str| folder.join(path).display().to_string();
    let shown = || {
        forebay(&home, &["refresh", &at("")]).succeeded();
        shell(&folder, "find * | sort | xargs").succeeded().trim().to_owned()
    };
    let directories = async || {
        let listed = bucket.list_directory("").await.expect("a listing").directories;
        listed.into_iter().filter(|name| name != ".forebay").collect::<Vec<_>>()
    };
    assert_eq!(shown(), "back gone gone/below kept moved moved/below moved/empty");
    shell(&folder, "rm -r gone && rmdir back && mv moved other && echo text > other/below/file").succeeded();
    let started = Instant::now();
    while directories().await != ["kept", "other"] {
        assert!(started.elapsed() < DEADLINE, "not in time: {:?}", directories().await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(shown(), "kept other other/below other/below/file other/empty");
    forebay(&home, &["trash", "restore", &at("back")]).succeeded();
    assert_eq!(shown(), "back kept other other/below other/below/file other/empty", "what comes back stays");
    put("gone/");
    assert_eq!(shown(), "back gone kept other other/below other/below/file other/empty", "it was made anew");
    mount.unmount();
    assert_eq!(directories().await, ["gone", "kept", "other"]);
    Forebay::new(&home, ["fsck", &source]).envs(&server.envs()).run().succeeded();
}
