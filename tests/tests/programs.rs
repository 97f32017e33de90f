//! Programs that write out of order, lock and sync: version control and a database.

use forebay_tests::{Mount, Scratch, require_fuse, shell};

fn mounted(scratch: &Scratch) -> Mount {
    let url = format!("file://{}", scratch.folder("bucket").display());
    Mount::new(&scratch.join("home"), &url, &scratch.join("mnt"), &[], &[])
}

#[test]
fn git_clones_commits_and_checks_out() {
    if !require_fuse("git_clones_commits_and_checks_out") {
        return;
    }
    let scratch = Scratch::new();
    let mut mount = mounted(&scratch);
    let origin = scratch.folder("origin");
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
    shell(mount.path(), &format!("{clone} && {second} && git gc -q && git fsck --strict")).succeeded();
    mount.unmount();
    mount.remount(&scratch.join("other-home"));
    let state = shell(
        &mount.path().join("repo"),
        "git fsck --strict && git status --porcelain && git log --format=%s",
    );
    assert_eq!(state.succeeded(), "two\none\n");
    mount.unmount();
}

#[test]
fn sqlite_commits_rolls_back_and_vacuums() {
    if !require_fuse("sqlite_commits_rolls_back_and_vacuums") {
        return;
    }
    let scratch = Scratch::new();
    let mut mount = mounted(&scratch);
    let script = scratch.join("walk.py");
    std::fs::write(
        &script,
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
    )
    .expect("the scratch folder is writable");
    shell(mount.path(), &format!("python3 {}", script.display())).succeeded();
    mount.unmount();
    mount.remount(&scratch.join("other-home"));
    let check = "import sqlite3; print(*(sqlite3.connect(f'{j}.db').execute('pragma integrity_check').fetchone()[0] \
                 for j in ('delete', 'truncate', 'wal')))";
    assert_eq!(shell(mount.path(), &format!("python3 -c \"{check}\"")).succeeded(), "ok ok ok\n");
    mount.unmount();
}
