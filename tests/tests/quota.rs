//! Quotas as a user sets and meets them.

use std::fs;
use std::path::Path;

use forebay_tests::{Forebay, Mount, Outcome, Scratch, TestBucket, require_fuse, shell};
use serde_json::Value;

fn forebay(home: &Path, words: &[&str]) -> Outcome {
    Forebay::new(home, words).run()
}

#[track_caller]
fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Programs learn of a quota where they go past it.
const PROGRAM: &str = r#"
import errno, os

def over(call):
    try:
        call()
    except OSError as error:
        assert error.errno == errno.EDQUOT, error
    else:
        raise AssertionError("it went past the quota")

MIB = 1 << 20
file = os.open("d/big", os.O_RDWR | os.O_CREAT)
for at in range(3):
    assert os.pwrite(file, bytes([at]) * MIB, at * MIB) == MIB
over(lambda: os.pwrite(file, b"x" * MIB, 10 * MIB))
over(lambda: os.ftruncate(file, 5 * MIB))
over(lambda: os.posix_fallocate(file, 0, 5 * MIB))
other = os.open("d/other", os.O_RDWR | os.O_CREAT)
assert os.write(other, b"y" * MIB) == MIB, "just what is left, though nothing is committed"
over(lambda: os.write(other, b"y"))
over(lambda: os.write(file, b"z" * 1) and os.pwrite(file, b"z", 3 * MIB))
os.close(file)
os.close(other)
assert os.stat("d/big").st_size == 3 * MIB and os.stat("d/other").st_size == MIB
over(lambda: os.write(os.open("d/big", os.O_WRONLY | os.O_APPEND), b"more"))

source = os.open("outside", os.O_RDWR | os.O_CREAT)
os.write(source, b"o" * MIB)
os.close(source)
source, third = os.open("outside", os.O_RDONLY), os.open("d/third", os.O_RDWR | os.O_CREAT)
over(lambda: os.copy_file_range(source, third, MIB))
os.close(third)
over(lambda: os.rename("outside", "d/outside"))
over(lambda: open("d/fourth", "x"))
over(lambda: os.mkdir("d/fifth"))
over(lambda: os.symlink("x", "d/sixth"))
os.link("d/third", "d/link")
os.unlink("d/third")
os.unlink("d/link")
os.rename("d/other", "other")
os.rename("outside", "d/outside")
os.truncate("d/outside", 7)
"#;

/// Promise S44: A directory's quota limits the inodes below it and the sum of the sizes of files below it; the quota of
/// the root is the volume's. What would go past it fails with EDQUOT: making a name at once, growing a file at the write.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_goes_past_a_quota_is_told_at_once() {
    if require_fuse("what_goes_past_a_quota_is_told_at_once") {
        let folder = Scratch::new();
        go_past_quotas(&TestBucket::folder(folder.path()).await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_goes_past_a_quota_on_s3_is_told_at_once() {
    if require_fuse("what_goes_past_a_quota_on_s3_is_told_at_once") {
        go_past_quotas(&TestBucket::s3().await);
    }
}

fn go_past_quotas(bucket: &TestBucket) {
    let scratch = Scratch::new();
    let (home, folder, source) = (scratch.folder("home"), scratch.join("mnt"), bucket.source());
    let mut mount = Mount::new(&home, &source, &folder, &["--take-over"], &bucket.envs());
    let at = |path: &str| folder.join(path).display().to_string();
    fs::create_dir(folder.join("d")).expect("made");
    forebay(&home, &["quota", "get", &at("d")]).failed_with("`/d` has no quota", "quota ls");
    forebay(&home, &["quota", "get", &at("")]).failed_with("`/` has no quota", "quota ls");
    let words = ["quota", "set", &at("d"), "--bytes", "4MiB", "--inodes", "3"];
    let shown = forebay(&home, &words).succeeded();
    assert!(shown.contains("4.00 MiB") && shown.contains("/d"), "{shown}");
    let program = scratch.join("program.py");
    fs::write(&program, PROGRAM).expect("written");
    let run = format!("python3 {}", program.display());
    shell(&folder, &run).succeeded();
    let get =
        |path: &str| parse(&forebay(&home, &["quota", "get", &at(path), "--json"]).succeeded())[0].clone();
    let quota = get("d");
    assert_eq!(
        (quota["bytes"].as_u64(), quota["inodes"].as_u64()),
        (Some((3 << 20) + 7), Some(2)),
        "{quota}"
    );

    // The volume's own is what `df` shows, and counts what was there before.
    forebay(&home, &["quota", "set", &at(""), "--bytes", "1GiB", "--inodes", "1000"]).succeeded();
    let df = shell(&folder, "df -B1 --output=size,used . | tail -1; df --output=itotal,iused . | tail -1")
        .succeeded();
    let numbers: Vec<u64> = df.split_whitespace().map(|word| word.parse().expect("a number")).collect();
    let used = (4 << 20) + 7;
    assert!(numbers[0] == 1 << 30 && numbers[1].abs_diff(used) < 1 << 17, "{df}");
    assert_eq!(numbers[2..], [1000, 4], "{df}");
    let listed = parse(&forebay(&home, &["quota", "ls", &at(""), "--json"]).succeeded());
    assert_eq!(listed.as_array().map(Vec::len), Some(2), "{listed}");
    assert_eq!((listed[0]["path"].as_str(), listed[1]["path"].as_str()), (Some("/"), Some("/d")), "{listed}");
    let table = forebay(&home, &["quota", "ls", &at("")]).succeeded();
    let paths: Vec<_> = table.lines().skip(1).filter_map(|line| line.split_whitespace().last()).collect();
    assert_eq!(paths, ["/", "/d"], "{table}");

    // A directory moves from one to the other, with all below it.
    shell(&folder, "mkdir -p tree/a/b && echo 12345 > tree/a/b/f && mkdir tree/c").succeeded();
    forebay(&home, &["quota", "set", &at("tree"), "--inodes", "4"]).succeeded();
    shell(&folder, "! mv tree d/tree 2> err && grep -q 'Disk quota exceeded' err && rm err").succeeded();
    forebay(&home, &["quota", "set", &at("d"), "--inodes", "none"]).succeeded();
    shell(&folder, "mv tree/a d/a").succeeded();
    assert_eq!((get("tree")["inodes"].as_u64(), get("d")["inodes"].as_u64()), (Some(1), Some(5)));
    assert_eq!(get("d")["most_inodes"], Value::Null);

    // A killed mount and the loss of its host change no count.
    shell(&folder, "python3 -c \"import os; os.fsync(os.open('.', os.O_RDONLY))\"").succeeded();
    mount.kill();
    let home = scratch.folder("other-home");
    mount.remount(&home);
    let listed = parse(&forebay(&home, &["quota", "ls", &at(""), "--json"]).succeeded());
    let counts: Vec<_> = listed.as_array().into_iter().flatten().map(|one| one["inodes"].as_u64()).collect();
    assert_eq!(counts, [Some(9), Some(5), Some(1)], "{listed}");
    shell(&folder, "! fallocate -l 2GiB huge 2> /dev/null && rm huge").succeeded();
    let ended = ["quota", "set", &at(""), "--bytes", "none", "--inodes", "none", "--json"];
    assert_eq!(parse(&forebay(&home, &ended).succeeded()).as_array().map(Vec::len), Some(0));
    shell(&folder, "truncate -s 2GiB huge && rm huge").succeeded();
    mount.unmount();
    Forebay::new(&home, ["fsck", &source]).envs(&bucket.envs()).run().succeeded();
}
