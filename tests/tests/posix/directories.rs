//! Large directories.

use super::*;

/// Promise S40: A directory may have a million entries: listing it takes memory in proportion to a few bytes a name, and
/// renaming it is one change however many it has.
#[test]
fn large_directories_are_listed_and_renamed_whole() {
    if !require_fuse("large_directories_are_listed_and_renamed_whole") {
        return;
    }
    let mut walk = Walk::new();
    let count = 4000 * scale();
    let resident = |walk: &Walk| {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", walk.mount.pid())).expect("a process");
        let line = status.lines().find(|line| line.starts_with("VmRSS")).expect("a size").to_owned();
        line.split_whitespace().nth(1).and_then(|kib| kib.parse::<usize>().ok()).expect("KiB") << 10
    };
    walk.python(&format!(
        r#"
os.mkdir("large")
for number in range({count}):
    os.mkfifo(f"large/entry-{{number:08}}")
"#
    ));
    let before = resident(&walk);
    walk.python(&format!(
        r#"
seen, extra = [], 0
with os.scandir("large") as entries:
    for entry in entries:
        seen.append(entry.name)
        if len(seen) % 5 == 0:
            os.mkfifo(f"large/added-{{extra}}")
            extra += 1
        if len(seen) % 3 == 0:
            os.unlink(f"large/{{entry.name}}")
old = [name for name in seen if name.startswith("entry-")]
assert len(old) == len(set(old)) == {count}, (len(old), len(set(old)))
left = sorted(os.listdir("large"))
os.rename("large", "renamed")
assert sorted(os.listdir("renamed")) == left and not os.path.exists("large")
os.fsync(os.open(".", os.O_RDONLY))
put("../left", "\n".join(left).encode())
"#
    ));
    // A few bytes a name in the cursors, and the map of hot entries.
    let grown = resident(&walk).saturating_sub(before);
    assert!(grown < (64 << 20) + 200 * count, "{grown} bytes for {count} names");
    walk.mount.kill();
    walk.mount.remount(&walk.scratch.join("home"));
    walk.python(
        r#"assert sorted(os.listdir("renamed")) == get("../left").decode().split("\n") and not os.path.exists("large")"#,
    );
}
