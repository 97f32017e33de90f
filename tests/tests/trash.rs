//! Deleting and bringing back, as a user does it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use forebay_tests::{Forebay, Mount, Outcome, Scratch, require_fuse, shell};
use serde_json::Value;

/// Longest that the mover may take to bring the bucket up to date: it is woken at once.
const DEADLINE: Duration = Duration::from_secs(30);

fn forebay(home: &Path, words: &[&str]) -> Outcome {
    Forebay::new(home, words).run()
}

#[track_caller]
fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < DEADLINE, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(20));
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
#[test]
fn what_was_deleted_is_gone_for_others_and_comes_back() {
    if !require_fuse("what_was_deleted_is_gone_for_others_and_comes_back") {
        return;
    }
    let scratch = Scratch::new();
    let (home, bucket, folder) = (scratch.folder("home"), scratch.folder("bucket"), scratch.join("mnt"));
    fs::write(bucket.join("plain"), "of another tool").expect("written");
    let source = format!("file://{}", bucket.display());
    let mut mount = Mount::new(&home, &source, &folder, &["--trash", "1d"], &[]);
    let at = |path: &str| folder.join(path).display().to_string();
    shell(
        &folder,
        "mkdir -p d/e && echo deep > d/e/f && chmod 750 d/e && chmod 600 d/e/f && python3 -c \"import os; os.setxattr('d/e/f', 'user.x', b'y')\" \
         && echo replaced > d/x && echo new > y && mv y d/x && rm -r d && rm plain",
    )
    .succeeded();
    wait_until("the objects are gone", || !bucket.join("plain").exists() && !bucket.join("d/x").exists());
    fs::write(folder.join("plain"), "another").expect("written");
    assert_eq!(fs::read_to_string(bucket.join("plain")).expect("a plain object"), "another");

    let listed = lines(&forebay(&home, &["trash", "ls", &at(""), "--json"]).succeeded());
    let mut paths: Vec<&str> = listed.iter().map(|one| one["path"].as_str().expect("a path")).collect();
    paths.sort_unstable();
    assert_eq!(paths, ["d", "d/e", "d/e/f", "d/x", "d/x", "plain"]);
    let shown = forebay(&home, &["trash", "ls", &at("d/e")]).succeeded();
    assert!(shown.contains("UNTIL") && shown.contains("d/e/f") && shown.lines().count() == 3, "{shown}");

    let taken = forebay(&home, &["trash", "restore", &at("plain")]);
    taken.failed_with("`plain` exists", "--to");
    assert_eq!(fs::read_to_string(folder.join("plain")).expect("bytes"), "another");
    forebay(&home, &["trash", "restore", &at("plain"), "--to", &at("old")]).succeeded();
    assert_eq!(fs::read_to_string(folder.join("old")).expect("bytes"), "of another tool");
    wait_until("it is an object again", || bucket.join("old").exists());
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
    forebay(&home, &["fsck", &source]).succeeded();
}
