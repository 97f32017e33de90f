//! Programs that write out of order, lock, sync and compare times: version control, a database, a compiler, a copier.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use forebay_tests::process::unmount;
use forebay_tests::settings::{skip, tool};
use forebay_tests::{Mounted, Seeded, assert_same_trees, is_long, require_fuse, scale, shell};

/// Runs `program` on a mount of a folder.
fn over_a_folder(test: &str, program: fn(&mut Mounted)) {
    if require_fuse(test) {
        let mut mounted = Mounted::folder(&[]);
        program(&mut mounted);
        mounted.end();
    }
}

/// Runs `programs` one after the other while the store fails, delays, refuses and loses answers, which costs them time
/// and nothing else.
fn over_a_troubled_store(test: &str, programs: &[fn(&mut Mounted)]) {
    if require_fuse(test) {
        let mut rng = Seeded::new();
        for _ in 0..scale().div_ceil(4) {
            let mut mounted = Mounted::troubled(&[], &mut rng);
            programs.iter().for_each(|program| program(&mut mounted));
            mounted.end();
        }
    }
}

#[test]
fn git_and_sqlite_work_over_a_troubled_store() {
    const ROWS: u32 = 3;
    let writers: fn(&mut Mounted) = match is_long() {
        true => |mounted| sqlite_writers(mounted, &JOURNALS, 10 * ROWS),
        // Two journals that work in different ways.
        false => |mounted| sqlite_writers(mounted, &["delete", "wal"], ROWS),
    };
    over_a_troubled_store("git_and_sqlite_work_over_a_troubled_store", &[git, writers]);
}

/// Those that take longer.
#[test]
fn compilers_and_copiers_work_over_a_troubled_store() {
    if is_long() {
        let programs: &[fn(&mut Mounted)] = &[sqlite, rsync, tar, python, cargo];
        over_a_troubled_store("compilers_and_copiers_work_over_a_troubled_store", programs);
    }
}

#[test]
fn git_clones_commits_and_checks_out() {
    over_a_folder("git_clones_commits_and_checks_out", git);
}

fn git(mounted: &mut Mounted) {
    let origin = mounted.folder_beside("origin");
    let identity = "git config user.name Tester && git config user.email tester@example.org";
    let first =
        "mkdir -p a/b && seq 20000 > a/b/numbers && head -c 300000 /dev/urandom > random && ln -s a link";
    shell(
        &origin,
        &format!("git init -q -b main . && {identity} && {first} && git add -A && git commit -qm one"),
    )
    .succeeded();
    let clone = format!("git clone -q {} repo && cd repo && {identity}", origin.display());
    let second =
        "seq 10000 > a/b/numbers && git commit -qam two && git checkout -q HEAD~1 && git checkout -q main";
    shell(mounted.path(), &format!("{clone} && {second} && git gc -q && git fsck --strict")).succeeded();
    mounted.move_on();
    let state = shell(
        &mounted.path().join("repo"),
        "git fsck --strict && git status --porcelain && git log --format=%s",
    );
    assert_eq!(state.succeeded(), "two\none\n");
}

#[test]
fn sqlite_commits_rolls_back_and_vacuums() {
    over_a_folder("sqlite_commits_rolls_back_and_vacuums", sqlite);
}

fn sqlite(mounted: &mut Mounted) {
    let script = mounted.file(
        "walk.py",
        "
import sqlite3
for journal in ('delete', 'truncate', 'wal'):
    db = sqlite3.connect(f'{journal}.db')
    assert db.execute(f'pragma journal_mode={journal}').fetchone()[0] == journal
    db.execute('create table t (id integer primary key, text text)')
    with db: db.executemany('insert into t (text) values (?)', ((f'row {i}' * 20,) for i in range(5000)))
    try:
        with db:
            db.execute('delete from t')
            raise KeyError
    except KeyError: pass
    with db: db.execute('update t set text = upper(text) where id % 7 = 0')
    with db: db.execute('delete from t where id % 2 = 0')
    db.execute('vacuum')
    assert db.execute('select count(*) from t').fetchone()[0] == 2500
    assert db.execute('pragma integrity_check').fetchone()[0] == 'ok'
    db.close()
",
    );
    shell(&mounted.folder_in("walk"), &format!("python3 {script}")).succeeded();
    mounted.move_on();
    let check = "import sqlite3; print(*(sqlite3.connect(f'{j}.db').execute('pragma integrity_check').fetchone()[0] \
                 for j in ('delete', 'truncate', 'wal')))";
    let checked = shell(&mounted.folder_in("walk"), &format!("python3 -c \"{check}\""));
    assert_eq!(checked.succeeded(), "ok ok ok\n");
}

/// How sqlite keeps what a transaction changes.
const JOURNALS: [&str; 3] = ["delete", "truncate", "wal"];

/// What four processes do at once to one database; each inserts its rows one commit at a time.
const WRITER: &str = r#"
import sqlite3, sys
journal, writer, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
db = sqlite3.connect(f"{journal}.db", timeout=120, isolation_level=None)
for row in range(rows):
    db.execute("begin immediate")
    total = db.execute("select total from sums").fetchone()[0]
    db.execute("insert into rows values (?, ?, ?)", (writer, row, "x" * (row * 37 % 3000)))
    db.execute("update sums set total = ?", (total + row,))
    db.execute("commit")
"#;

/// Locks keep four writers apart in each journal mode: no row and no update of the sum that all change is lost, and
/// the index that shares memory with the others in WAL mode holds.
#[test]
fn sqlite_takes_four_writers() {
    over_a_folder("sqlite_takes_four_writers", |mounted| {
        sqlite_writers(mounted, &JOURNALS, 40);
    });
}

/// Each writer inserts `rows` in each of `journals`.
fn sqlite_writers(mounted: &mut Mounted, journals: &[&str], rows: u32) {
    let writer = mounted.file("writer.py", WRITER);
    let folder = mounted.folder_in("writers");
    for journal in journals {
        let prepare = format!(
            "import sqlite3; db = sqlite3.connect('{journal}.db'); db.execute('pragma journal_mode={journal}'); \
             db.executescript('create table rows (writer, row, text, primary key (writer, row)); \
             create table sums (total); insert into sums values (0)')"
        );
        let run = format!("python3 {writer} {journal} $writer {rows}");
        let writers = format!("for writer in 1 2 3 4; do {run} & pids+=($!); done");
        shell(
            &folder,
            &format!(
                "python3 -c \"{prepare}\"; pids=(); {writers}; for pid in ${{pids[@]}}; do wait $pid; done"
            ),
        )
        .succeeded();
    }
    let names = journals.join("', '");
    let check = format!(
        "import sqlite3
for journal in ('{names}',):
    db = sqlite3.connect(f'{{journal}}.db')
    print(*(db.execute(q).fetchone()[0] for q in ('pragma journal_mode', 'pragma integrity_check', \
     'select count(*) from rows', 'select sum(row) from rows', 'select total from sums')))"
    );
    let sum = 4 * (0..rows).sum::<u32>();
    // How a journal is ended is the connection's affair; only WAL is written down in the database.
    let stored = |journal: &&str| if *journal == "wal" { "wal" } else { "delete" };
    let line = |journal| format!("{} ok {} {sum} {sum}\n", stored(journal), 4 * rows);
    let expected: String = journals.iter().map(line).collect();
    assert_eq!(shell(&folder, &format!("python3 -c \"{check}\"")).succeeded(), expected);
    mounted.move_on();
    assert_eq!(shell(&folder, &format!("python3 -c \"{check}\"")).succeeded(), expected);
}

/// A workspace without dependencies: a library with a build script and tests of three kinds, and a program over it.
fn workspace(folder: &Path) {
    let files = [
        ("Cargo.toml", "[workspace]\nresolver = \"3\"\nmembers = [\"app\", \"sum\"]\n"),
        ("sum/Cargo.toml", "[package]\nname = \"sum\"\nversion = \"0.1.0\"\nedition = \"2024\"\n"),
        (
            "sum/build.rs",
            "fn main() {
    println!(\"cargo::rerun-if-changed=build.rs\");
    let folder = std::env::var_os(\"OUT_DIR\").unwrap();
    std::fs::write(std::path::Path::new(&folder).join(\"first.rs\"), \"40\").unwrap();
}
",
        ),
        (
            "sum/src/lib.rs",
            "//! Sums.
/// Adds to what the build script wrote.
///
/// ```
/// assert_eq!(sum::sum(2), 42);
/// ```
pub fn sum(more: u32) -> u32 {
    include!(concat!(env!(\"OUT_DIR\"), \"/first.rs\")) + more
}
#[cfg(test)]
mod tests {
    #[test]
    fn it_adds() {
        assert_eq!(super::sum(1), 41);
    }
}
",
        ),
        ("sum/tests/outer.rs", "#[test]\nfn from_outside() {\n    assert_eq!(sum::sum(3), 43);\n}\n"),
        (
            "app/Cargo.toml",
            "[package]\nname = \"app\"\nversion = \"0.1.0\"\nedition = \"2024\"\n
[dependencies]\nsum = { path = \"../sum\" }\n",
        ),
        ("app/src/main.rs", "fn main() {\n    println!(\"{}\", sum::sum(2));\n}\n"),
    ];
    for (path, text) in files {
        let path = folder.join(path);
        fs::create_dir_all(path.parent().expect("in a folder")).expect("a folder can be made");
        fs::write(path, text).expect("a file can be written");
    }
}

/// A compiler maps, locks and links files there, and times tell it what is up to date, also after another mount.
#[test]
fn cargo_builds_and_tests() {
    over_a_folder("cargo_builds_and_tests", cargo);
}

fn cargo(mounted: &mut Mounted) {
    workspace(&mounted.path().join("workspace"));
    let cargo = |mounted: &Mounted, words: &str| {
        let environment =
            "env -u RUSTFLAGS -u CARGO_ENCODED_RUSTFLAGS CARGO_TARGET_DIR=target CARGO_TERM_COLOR=never";
        let folder = mounted.path().join("workspace");
        shell(&folder, &format!("{environment} cargo {words} --offline -j 2 2>&1")).succeeded()
    };
    let count = |text: &str, words: &str| text.lines().filter(|line| line.contains(words)).count();
    let built = cargo(mounted, "build");
    assert_eq!(count(&built, "Compiling"), 2, "{built}");
    assert_eq!(shell(mounted.path(), "workspace/target/debug/app").succeeded(), "42\n");
    let tested = cargo(mounted, "test");
    assert_eq!(count(&tested, "test result: ok. 1 passed"), 3, "{tested}");
    let main = mounted.path().join("workspace/app/src/main.rs");
    fs::write(main, "fn main() {\n    println!(\"{}\", sum::sum(4));\n}\n").expect("a file can be written");
    let built = cargo(mounted, "build");
    assert_eq!((count(&built, "Compiling"), count(&built, "Compiling app")), (1, 1), "{built}");
    mounted.move_on();
    let built = cargo(mounted, "build");
    assert_eq!(count(&built, "Compiling"), 0, "{built}");
    assert_eq!(shell(mounted.path(), "workspace/target/debug/app").succeeded(), "44\n");
}

/// A tree of small files and a large one, with links, a pipe, modes and times.
const FILL: &str = "mkdir -p a/b/empty; for i in $(seq 200); do head -c $((i * 97)) /dev/urandom > a/$i; done
    head -c 9000000 /dev/urandom > a/b/large; ln -s ../large a/b/link; ln a/1 a/b/hard; mkfifo a/b/pipe
    chmod 640 a/2; touch -d '2001-02-03 04:05:06.789012345' a/3 a/b; : > a/none";

/// Files transferred and bytes of them, by `rsync --stats`.
fn transferred(stats: &str) -> (u64, u64) {
    let number = |words: &str| {
        let line = stats.lines().find(|line| line.starts_with(words)).expect("a line of counts");
        let digits: String = line.chars().filter(char::is_ascii_digit).collect();
        digits.parse().expect("a number")
    };
    (number("Number of regular files transferred"), number("Total transferred file size"))
}

/// A copy with all that it keeps is up to date for the second run, onto the mount and from it.
#[test]
fn rsync_transfers_nothing_twice() {
    over_a_folder("rsync_transfers_nothing_twice", rsync);
}

fn rsync(mounted: &mut Mounted) {
    let Some(rsync) = tool("rsync", "rsync_transfers_nothing_twice") else { return };
    let source = mounted.folder_beside("source");
    shell(&source, FILL).succeeded();
    let size = (1..=200).map(|i| i * 97).sum::<u64>() + 9_000_000;
    let run = |from: &Path, to: &Path, more: &str| {
        let command = format!("{} -aH --stats {more} {}/ {}/", rsync.display(), from.display(), to.display());
        transferred(&shell(Path::new("/"), &command).succeeded())
    };
    let (copy, back) = (mounted.path().join("copy"), mounted.folder_beside("back"));
    assert_eq!(run(&source, &copy, ""), (202, size));
    assert_eq!(run(&source, &copy, ""), (0, 0));
    assert_same_trees(&source, &copy, true);
    mounted.move_on();
    assert_eq!(run(&source, &copy, ""), (0, 0));
    assert_eq!(run(&source, &copy, "--checksum"), (0, 0));
    // What changed goes, alone; what went, goes.
    shell(&source, "echo more >> a/7; rm a/8; mv a/9 a/nine").succeeded();
    assert_eq!(run(&source, &copy, "--delete --inplace").0, 2);
    assert_same_trees(&source, &copy, true);
    assert_eq!(run(&copy, &back, ""), (201, size + 5 - 8 * 97));
    assert_eq!(run(&copy, &back, ""), (0, 0));
    assert_same_trees(&source, &back, true);
}

/// What tar packs and unpacks there is what it was, here and on another machine.
fn tar(mounted: &mut Mounted) {
    let source = mounted.folder_beside("tar-source");
    shell(&source, FILL).succeeded();
    let pack = format!("tar -C {} -cf archive.tar .", source.display());
    shell(mounted.path(), &format!("{pack} && mkdir untarred && tar -C untarred -xf archive.tar"))
        .succeeded();
    assert_same_trees(&source, &mounted.path().join("untarred"), true);
    mounted.move_on();
    assert_same_trees(&source, &mounted.path().join("untarred"), true);
    shell(mounted.path(), &format!("tar -C {} -df archive.tar", source.display())).succeeded();
}

#[test]
fn a_python_environment_installs_and_runs() {
    over_a_folder("a_python_environment_installs_and_runs", python);
}

fn python(mounted: &mut Mounted) {
    let install =
        "python3 -m venv venv && venv/bin/python -c 'import pip; print(pip.__file__)' | grep -q venv";
    shell(mounted.path(), install).succeeded();
    mounted.move_on();
    shell(mounted.path(), "venv/bin/python -m pip --version").succeeded();
}

/// Files, directories and links come, go, move and take each other's places, of which each overlay layer keeps its part.
const CHANGES: &str = r#"
echo more >>kept/text; chmod 600 kept/text; touch -d @86400 kept/text
rm gone/one; rm -r old; mkdir old; echo new >old/file
mv moved/one moved/two; mv moved/two top; mv whole elsewhere
rm kind; mkdir kind; echo in >kind/file
rm -r other; ln -s kept other; ln kept/text kept/again
git init -q . && git add . && git -c user.name=a -c user.email=a@b commit -qm all && git gc -q && rm -rf .git
for index in $(seq 200); do echo $index >many/$index; done; rm many/1*; mv many/2 many/3
"#;

#[test]
fn an_overlay_has_its_upper_layer_there() {
    let test = "an_overlay_has_its_upper_layer_there";
    let known = "grep -qw overlay /proc/filesystems";
    if shell(Path::new("/"), &format!("{known} || modprobe overlay && {known}")).code != Some(0) {
        return skip(test, "this kernel has no overlay");
    }
    over_a_folder(test, overlay);
}

fn overlay(mounted: &mut Mounted) {
    let (lower, plain) = (mounted.folder_beside("lower"), mounted.folder_beside("plain"));
    let fill = "mkdir kept gone old moved whole whole/deep other many
        for file in kept/text gone/one gone/two old/file moved/one whole/deep/file kind other/file many/150; do
            echo $file >$file
        done";
    shell(&lower, fill).succeeded();
    shell(&plain, &format!("cp -a {}/. . && {CHANGES}", lower.display())).succeeded();
    let (upper, work) = (mounted.folder_in("upper"), mounted.folder_in("work"));
    let folder = mounted.folder_beside("merged");
    let options =
        format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
    let mount = format!("mount -t overlay overlay -o {options} {}", folder.display());
    let merged = Merged::new(&mount, &folder);
    shell(&folder, CHANGES).succeeded();
    assert_same_trees(&plain, &folder, true);
    merged.unmount();
    assert!(fs::symlink_metadata(upper.join("gone/one")).is_ok_and(|left| left.file_type().is_char_device()));
    mounted.move_on();
    let merged = Merged::new(&mount, &folder);
    assert_same_trees(&plain, &folder, true);
    merged.unmount();
}

/// A mounted overlay; in the way of what is below it until it is gone.
struct Merged<'a>(Option<&'a Path>);

impl<'a> Merged<'a> {
    #[track_caller]
    fn new(mount: &str, folder: &'a Path) -> Self {
        shell(Path::new("/"), mount).succeeded();
        Self(Some(folder))
    }

    fn unmount(mut self) {
        self.0.take().into_iter().for_each(unmount);
    }
}

impl Drop for Merged<'_> {
    fn drop(&mut self) {
        if let Some(folder) = self.0.take() {
            shell(Path::new("/"), &format!("umount -l {}", folder.display()));
        }
    }
}
