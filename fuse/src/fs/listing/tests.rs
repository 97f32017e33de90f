//! Positions and their memory, over directories that are made up as they are read.

use super::*;

/// Names that sort as their numbers do: eight digits with something before and after them.
#[derive(Debug, Clone, Copy)]
struct Shape {
    prefix: usize,
    len: usize,
}

const SHORT: Shape = Shape { prefix: 0, len: 9 };
const UUID: Shape = Shape { prefix: 0, len: 36 };
const LONGEST: Shape = Shape { prefix: 200, len: 255 };

/// A directory in which of `count` names every third one may be gone, and others may have come after every fifth one.
#[derive(Debug, Clone, Copy)]
struct Directory {
    shape: Shape,
    count: u64,
    changed: bool,
}

impl Shape {
    fn name(self, number: u64) -> Bytes {
        let Self { prefix, len } = self;
        format!("{:p<prefix$}{number:08}{:x<rest$}", "", "", rest = len - prefix - 8).into()
    }

    /// A name between `number` and the next.
    fn newcomer(self, number: u64) -> Bytes {
        let name = self.name(number);
        [&name[..name.len().min(254)], b"~"].concat().into()
    }

    fn number(self, name: &[u8]) -> u64 {
        let digits = &name[self.prefix..self.prefix + 8];
        std::str::from_utf8(digits).expect("digits").parse().expect("a number")
    }
}

impl Directory {
    fn after(self, name: Option<&[u8]>, limit: usize) -> (Vec<Bytes>, bool) {
        let Self { shape, count, changed } = self;
        let first = name.map_or(0, |name| shape.number(name));
        let of_number = |number: u64| {
            let stays = (!changed || !number.is_multiple_of(3)).then(|| shape.name(number));
            let came = (changed && number.is_multiple_of(5)).then(|| shape.newcomer(number));
            stays.into_iter().chain(came)
        };
        let mut names =
            (first..count).flat_map(of_number).filter(|found| name.is_none_or(|name| found[..] > *name));
        let page = names.by_ref().take(limit).collect();
        (page, names.next().is_none())
    }

    /// The names that come first after a position, with as few reads as are noted.
    fn go_on(self, cursor: &Cursor, number: u64, reads: &mut u64) -> Vec<Bytes> {
        let mut seek = cursor.seek(number);
        loop {
            *reads += 1;
            let (page, complete) = self.after(seek.after.as_deref(), BLOCK_NAMES);
            if let Some(passed) = seek.advance(&page.iter().collect::<Vec<_>>(), complete) {
                return page[passed..].to_vec();
            }
        }
    }

    /// Reads all of it, from the start.
    fn read(self, cursor: &mut Cursor) {
        for number in 0..self.count {
            let (name, previous) = (self.shape.name(number), number + DOT_DOT);
            assert_eq!(cursor.number_after(previous, &name), previous + 1);
            cursor.note(previous + 1, &name);
        }
    }
}

fn number(text: Option<&Bytes>, shape: Shape) -> Option<u64> {
    text.map(|name| shape.number(name))
}

/// Thousands of names, or a million in a long run.
fn many() -> u64 {
    let scale = std::env::var("FOREBAY_TEST_SCALE").ok().and_then(|scale| scale.parse().ok());
    50_000 * scale.unwrap_or(1u64)
}

#[test]
fn a_new_cursor_starts_behind_dot_dot() {
    let directory = Directory { shape: SHORT, count: 3, changed: false };
    assert_eq!(directory.go_on(&Cursor::default(), DOT_DOT, &mut 0), directory.after(None, 3).0);
}

/// In the long run, of a million entries.
#[test]
fn every_position_is_exact_among_names_of_any_length_in_little_memory() {
    for (shape, bytes_each) in [(SHORT, 9), (UUID, 10), (LONGEST, 13)] {
        let (mut cursor, mut reads) = (Cursor::default(), 0);
        let directory = Directory { shape, count: many(), changed: false };
        directory.read(&mut cursor);
        let asked: Vec<u64> = (0..directory.count).step_by(997).collect();
        for at in &asked {
            let found = directory.go_on(&cursor, at + 3, &mut reads);
            let next = Some(at + 1).filter(|next| *next < directory.count);
            assert_eq!(number(found.first(), shape), next, "{shape:?}");
        }
        assert!(reads <= asked.len() as u64 + 1, "a page holds a block: {reads} reads");

        let directory = Directory { changed: true, ..directory };
        for at in asked {
            let found = directory.go_on(&cursor, at + 3, &mut 0);
            let stays = found.iter().find(|name| !name.ends_with(b"~"));
            let next = (at + 1..directory.count).find(|next| next % 3 != 0);
            assert_eq!(number(stays, shape), next, "{shape:?}");
        }
        let bytes = cursor.bytes as u64;
        assert!(bytes <= bytes_each * directory.count, "{bytes} bytes for {} names", directory.count);
        assert!(bytes_each * 2_500_000 <= LOG_BYTES as u64, "a million entries, and what comes and goes");
    }
}

#[test]
fn a_position_is_found_where_all_around_it_is_gone_or_new() {
    let (shape, count) = (UUID, 3 * BLOCK_NAMES as u64);
    let mut cursor = Cursor::default();
    Directory { shape, count, changed: false }.read(&mut cursor);
    // Of the second block only two names are left, with more newcomers on both sides than a page holds.
    let (first, second) = (shape.name(140), shape.name(250));
    let near = |name: &Bytes| {
        let newcomer = |at: u64| Bytes::from([&name[..], format!("~{at:03}").as_bytes()].concat());
        std::iter::once(name.clone()).chain((0..300).map(newcomer)).collect::<Vec<_>>()
    };
    let names: Vec<Bytes> =
        [near(&first), near(&second), near(&shape.name(255)), vec![shape.name(256)]].concat();
    let read = |number: u64| {
        let mut seek = cursor.seek(number + 3);
        for _ in 0..20 {
            let later: Vec<&Bytes> = names.iter().filter(|name| Some(*name) > seek.after.as_ref()).collect();
            let page = &later[..later.len().min(BLOCK_NAMES)];
            if let Some(passed) = seek.advance(page, page.len() == later.len()) {
                return later[passed].clone();
            }
        }
        panic!("no way to {number}");
    };
    for (position, next) in [
        (130, names[0].clone()),
        (139, names[0].clone()),
        (140, names[1].clone()),
        (200, names[1].clone()),
        (249, names[1].clone()),
        (250, names[302].clone()),
        (254, names[302].clone()),
        (255, names[603].clone()),
    ] {
        assert_eq!(read(position), next, "after {position}");
    }
}

#[test]
fn a_seek_reads_no_further_than_its_block() {
    let directory = Directory { shape: UUID, count: 50_000, changed: false };
    let mut cursor = Cursor::default();
    directory.read(&mut cursor);
    // All of the first blocks is gone, and what is left of the directory is long.
    let mut seek = cursor.seek(60);
    let (page, complete) = directory.after(Some(&UUID.name(2000)), BLOCK_NAMES);
    assert_eq!(seek.advance(&page.iter().collect::<Vec<_>>(), complete), Some(0));
}

#[test]
fn names_read_again_keep_their_numbers_and_new_ones_get_new_numbers() {
    let directory = Directory { shape: SHORT, count: 5000, changed: false };
    let mut cursor = Cursor::default();
    directory.read(&mut cursor);
    assert_eq!(cursor.number_after(2, &SHORT.name(0)), 3);
    let newcomer = SHORT.newcomer(0);
    assert_eq!(cursor.number_after(3, &newcomer), 5004, "it does not follow what has number 5002");
    cursor.note(5004, &newcomer);
    assert_eq!(cursor.number_after(5004, &SHORT.name(1)), 5005, "the run of new numbers goes on");
    for at in [3, 4, 777, 5001] {
        let next = directory.go_on(&cursor, at, &mut 0);
        assert_eq!(next.first(), Some(&SHORT.name(at - 2)));
    }
    assert_eq!(directory.go_on(&cursor, 5002, &mut 0), Vec::<Bytes>::new());
    assert_eq!(directory.go_on(&cursor, 5004, &mut 0).first(), Some(&SHORT.name(1)));
}

#[test]
fn memory_is_bounded_for_any_directory() {
    let directory = Directory { shape: SHORT, count: 200_000, changed: false };
    let mut cursor = Cursor::with_limit(64 << 10);
    for at in 0..directory.count {
        cursor.note(at + 3, &SHORT.name(at));
        assert!(cursor.bytes <= 64 << 10, "{at}");
        let new = at.saturating_sub((NEWEST_BLOCKS as u64 - 1) * BLOCK_NAMES as u64);
        assert!(cursor.knows(new + 3) && cursor.knows(at + 3), "{at}: what was just read stays");
    }
    let mut reads = 0;
    for at in [100_000, 150_001, 199_998] {
        let next = directory.go_on(&cursor, at + 3, &mut reads);
        assert_eq!(
            next.first(),
            Some(&SHORT.name(at + 1)),
            "nothing changed: what is left out can be counted"
        );
    }
    assert!(reads > 100, "{reads}");
    assert!(!cursor.knows(100_000));
}

#[test]
fn a_position_in_a_later_run_is_counted_from_names_of_that_run() {
    let directory = Directory { shape: SHORT, count: 200_000, changed: false };
    let mut cursor = Cursor::with_limit(64 << 10);
    let (early, late) = (3 * BLOCK_NAMES as u64, 100 * BLOCK_NAMES as u64);
    for at in 0..early {
        cursor.note(at + 3, &SHORT.name(100_000 + at));
    }
    let first = cursor.number_after(DOT_DOT, &SHORT.name(0));
    for at in 0..late {
        cursor.note(first + at, &SHORT.name(at));
        assert!(cursor.bytes <= 64 << 10, "{at}");
    }
    assert!((0..late).any(|at| !cursor.knows(first + at)), "blocks were thinned out");
    let mut reads = 0;
    for at in (0..late).step_by(61) {
        let next = directory.go_on(&cursor, first + at, &mut reads);
        assert_eq!(next.first(), Some(&SHORT.name(at + 1)), "{at}");
    }
}

#[test]
fn memory_is_bounded_for_any_number_of_runs() {
    let mut cursor = Cursor::with_limit(64 << 10);
    for at in 0..5_000 {
        cursor.note(2 * at + 3, &SHORT.name(at));
        assert!(cursor.bytes <= 64 << 10, "{at}");
    }
}
