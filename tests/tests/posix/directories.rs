//! Large directories.

use super::*;

/// Bytes of memory of its own that the mount holds: pages of the tree's file are the kernel's.
fn resident(walk: &Walk) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", walk.mount.pid())).expect("a process");
    let line = status.lines().find(|line| line.starts_with("RssAnon")).expect("a size");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<usize>().ok()).expect("KiB") << 10
}

/// Promise S40: A directory may have a million entries: listing it takes memory in proportion to a few bytes a name, and
/// renaming it is one change however many it has.
#[test]
fn large_directories_are_listed_and_renamed_whole() {
    if !require_fuse("large_directories_are_listed_and_renamed_whole") {
        return;
    }
    let mut walk = Walk::new();
    let count = 4000 * scale();
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

/// A name as long and as unlike its neighbours as a UUID; [`LIST`] makes the same.
fn spread_name(number: usize) -> String {
    let spread = (number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    format!("{spread:016x}-{number:019}")
}

/// Lists `large` again and again while entries come and go: changed by the reader between two names, and by others all
/// the time. Prints the listings, and the changes that the reader made.
const LIST: &str = r#"
import random
count, seed = int(os.environ["COUNT"]), int(os.environ["SEED"])
chance = random.Random(seed)
entry = lambda number: f"large/{number * 0x9E3779B97F4A7C15 % 2 ** 64:016x}-{number:019}"
going = chance.sample(range(count), min(count // 10, 20_000))
stays = set(range(count)).difference(going)

def churn(worker, numbers):
    """Removes entries, and makes others beside them that go soon, until all is done."""
    for number in numbers:
        os.unlink(entry(number))
        for other in (f"{entry(number)}-{worker}", f"large/{worker}-{number}"):
            os.mkfifo(other)
            os.unlink(other)
    os._exit(0)

third = len(going) // 3
workers = []
for worker in range(2):
    child = os.fork()
    if child == 0:
        churn(worker, going[worker * third:(worker + 1) * third])
    workers.append(child)
own, added, listings = going[2 * third:], 0, 0
while workers or own:
    for child in list(workers):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0, status
            workers.remove(child)
    seen, all_seen = bytearray(count), set()
    with os.scandir("large") as entries:
        for at, found in enumerate(entries):
            name = found.name
            if len(name) == 36:
                assert not seen[int(name[17:])], f"{name} comes twice"
                seen[int(name[17:])] = 1
            else:
                assert name not in all_seen, f"{name} comes twice"
                all_seen.add(name)
            if at % 25 == 0 and own:
                number = own.pop()
                os.unlink(entry(number))
                os.mkfifo(f"{entry(number)}-own")
                os.mkfifo(f"large/{number}-own")
                added += 2
    missing = [number for number in stays if not seen[number]]
    assert not missing, f"{len(missing)} of {len(stays)} are missing: {missing[:5]}"
    listings += 1
with os.scandir("large") as entries:
    left = sum(1 for _ in entries)
assert left == len(stays) + added, (left, len(stays), added)
print(listings, added)
"#;

/// Promise S31: A position in a directory (telldir, or where a listing goes on) leads to the same place for as long as the
/// directory is open, whatever came and went meanwhile; what was there all the time is listed exactly once.
#[test]
fn a_million_entries_are_listed_while_others_come_and_go() {
    if !require_fuse("a_million_entries_are_listed_while_others_come_and_go") {
        return;
    }
    let count = 50_000 * scale();
    let mut rng = Seeded::new();
    let seed: u64 = rng.random();
    // Taken over from the bucket: making them one by one through a mount takes many times as long.
    let mut walk = Walk::over(|bucket| {
        std::fs::create_dir(bucket.join("large")).expect("a folder");
        for number in 0..count {
            std::fs::File::create(bucket.join("large").join(spread_name(number))).expect("an object");
        }
    });
    let before = resident(&walk);
    let mut first = std::fs::read_dir(walk.mount.path().join("large")).expect("a directory");
    assert!(first.next().is_some_and(|entry| entry.is_ok()));
    drop(first);
    let settings = format!("os.environ.update(COUNT='{count}', SEED='{seed}')");
    let shown = walk.python(&format!("{settings}{LIST}"));
    let counts: Vec<usize> = shown.split_whitespace().map(|word| word.parse().expect("a count")).collect();
    assert!(counts[0] >= 1 && counts[1] >= (count / 30).min(6000), "{shown}");
    let grown = resident(&walk).saturating_sub(before);
    // The first listing holds all objects; what has not reached the engine yet is bounded.
    assert!(grown < (160 << 20) + 1024 * count, "{grown} bytes for {count} names");
    walk.mount.unmount();
}
