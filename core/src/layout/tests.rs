//! Layout edits against a plain array of bytes.

use std::collections::HashSet;

use super::*;
use crate::{ObjectKey, Version};

const SPACE: u64 = 64;

/// Where a byte comes from, for comparing a layout with the array model: (blob number, offset in it).
type Cell = Option<(u64, u64)>;

fn blob(number: u64) -> Blob {
    Blob { key: ObjectKey::new(number.to_string()), version: Version::new("v"), size: 2 * SPACE }
}

fn cells(layout: &FileLayout) -> Vec<Cell> {
    let mut cells = Vec::new();
    for piece in layout.pieces(0..u64::MAX) {
        assert_eq!(piece.range.start, cells.len() as u64, "pieces leave no gap");
        for at in piece.range.clone() {
            cells.push(match &piece.source {
                None => None,
                Some(Source::Inline(bytes)) => {
                    Some((1000, u64::from(bytes[(at - piece.range.start) as usize])))
                }
                Some(Source::Blob { blob, offset }) => {
                    Some((blob.key.as_str().parse().expect("number"), offset + at - piece.range.start))
                }
            });
        }
    }
    cells
}

/// A small generator of its own, so that a seed gives the same steps everywhere (splitmix64).
fn next(state: &mut u64, bound: u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)) % bound
}

/// Makes an edit, of at most `longest` bytes, of a layout of up to `space` bytes and of what it should be. Returns where.
fn edit(layout: &mut FileLayout, model: &mut Vec<Cell>, state: &mut u64, space: u64, longest: u64) -> u64 {
    let start = next(state, space);
    let end = start + 1 + next(state, (space - start).min(longest));
    match next(state, 6) {
        0 | 1 => {
            let number = next(state, 3);
            // Sometimes at the same place in the blob as in the file, so that neighbours merge.
            let offset = if next(state, 2) == 0 { start } else { next(state, space) };
            let source = Source::Blob { blob: Blob { size: 2 * space, ..blob(number) }, offset };
            layout.write(Extent { offset: start, length: end - start, source });
            model.resize(model.len().max(end as usize), None);
            for at in start..end {
                model[at as usize] = Some((number, offset + at - start));
            }
        }
        2 => {
            let bytes: Vec<u8> = (start..end).map(|at| at as u8).collect();
            let source = Source::Inline(bytes.into());
            layout.write(Extent { offset: start, length: end - start, source });
            model.resize(model.len().max(end as usize), None);
            for at in start..end {
                model[at as usize] = Some((1000, at % 256));
            }
        }
        3 => {
            let to = next(state, space);
            let source = layout.clone();
            layout.copy(&source, start..end, to);
            let cells: Vec<Cell> =
                model.iter().copied().skip(start as usize).take((end - start) as usize).collect();
            if !cells.is_empty() {
                model.resize(model.len().max(to as usize + cells.len()), None);
                model[to as usize..][..cells.len()].copy_from_slice(&cells);
            }
        }
        4 => {
            layout.punch(start..end);
            for at in start..end.min(model.len() as u64) {
                model[at as usize] = None;
            }
        }
        // Not too short where edits are to be here and there.
        _ => {
            let size = if longest < space { space - end + start } else { start };
            layout.truncate(size);
            model.resize(size as usize, None);
        }
    }
    start
}

fn check(layout: &FileLayout, model: &[Cell], what: &str) {
    assert_eq!(cells(layout), model, "{what}");
    assert_eq!(layout.allocated(), model.iter().flatten().count() as u64, "{what}");
    let inline = model.iter().flatten().filter(|(number, _)| *number == 1000).count();
    assert_eq!(layout.inline_bytes(), inline as u64, "{what}");
    layout.extents().check();
    layout.check().unwrap_or_else(|error| panic!("{what}: {error}"));
}

fn check_seed(seed: u64) {
    let mut state = seed;
    let mut layout = FileLayout::empty();
    let mut model: Vec<Cell> = Vec::new();
    for step in 0..200 {
        let start = edit(&mut layout, &mut model, &mut state, SPACE, SPACE);
        check(&layout, &model, &format!("seed {seed} step {step}"));
        check_seeks(&layout, &model, start, seed);
    }
}

fn check_seeks(layout: &FileLayout, model: &[Cell], from: u64, seed: u64) {
    if from >= model.len() as u64 {
        return;
    }
    let tail = &model[from as usize..];
    let data = tail.iter().position(Option::is_some).map(|at| from + at as u64);
    let hole = tail.iter().position(Option::is_none).map_or(model.len() as u64, |at| from + at as u64);
    assert_eq!(layout.next_data(from), data, "seed {seed}");
    assert_eq!(layout.next_hole(from), hole, "seed {seed}");
}

#[test]
fn edits_agree_with_an_array() {
    for seed in 0..300 {
        check_seed(seed);
    }
}

/// A file of `count` extents of one byte, each of which is followed by a hole.
fn dotted(count: u64) -> FileLayout {
    let extent = |number: u64| {
        let source = Source::Blob { blob: Blob { size: 4 * count, ..blob(number % 3) }, offset: number };
        Extent { offset: 2 * number, length: 1, source }
    };
    FileLayout::from_parts(2 * count, (0..count).map(extent).collect()).expect("a layout")
}

#[test]
fn edits_of_many_extents_agree_with_an_array() {
    for seed in 0..20 {
        let mut state = seed;
        let mut layout = dotted(4096);
        let (mut model, size) = (cells(&layout), layout.size());
        for step in 0..60 {
            let before = layout.clone();
            let longest = if next(&mut state, 4) == 0 { size / 4 } else { 20 };
            edit(&mut layout, &mut model, &mut state, size, longest);
            check(&layout, &model, &format!("seed {seed} step {step}"));
            let is_in = |layout: &FileLayout, extent: &Extent| {
                layout.extents().iter_from(extent.offset).next() == Some(extent)
            };
            let (mut old, mut new) = (Vec::new(), Vec::new());
            for difference in before.extents().differences(layout.extents()) {
                match difference {
                    Difference::Old(extent) => old.push(extent),
                    Difference::New(extent) => new.push(extent),
                }
            }
            assert!(old.iter().all(|extent| !is_in(&layout, extent)), "seed {seed} step {step}");
            assert!(new.iter().all(|extent| !is_in(&before, extent)), "seed {seed} step {step}");
            let (of_old, of_new) = (before.extents().len() - old.len(), layout.extents().len() - new.len());
            assert_eq!(of_old, of_new, "seed {seed} step {step}: what is left is in both");
            assert_eq!(before.extents() == layout.extents(), old.is_empty() && new.is_empty());
            if step % 5 == 0 {
                check_blobs(&layout, &before, &format!("seed {seed} step {step}"));
            }
        }
    }
}

/// Which blobs a layout has, and that it is asked as well for those of another.
fn check_blobs(layout: &FileLayout, other: &FileLayout, what: &str) {
    let all: HashSet<&Blob> = layout.blobs().collect();
    let plain: HashSet<&Blob> = layout.plain_objects().collect();
    assert_eq!(plain, all.iter().copied().filter(|blob| !blob.is_owned()).collect(), "{what}");
    let keys: BTreeSet<&str> = other.blobs().map(|blob| blob.key.as_str()).step_by(3).collect();
    let found: HashSet<&Blob> = layout.blobs_at(&keys).collect();
    assert_eq!(found, all.into_iter().filter(|blob| keys.contains(blob.key.as_str())).collect(), "{what}");
}

#[test]
fn blobs_are_found_by_their_keys() {
    let number_of = |number: u64, extents: u64| {
        let prefix = if number.is_multiple_of(50) { "" } else { Blob::OWNED_PREFIX };
        let key = ObjectKey::new(format!("{prefix}{}", number % extents));
        Blob { key, version: Version::new("v"), size: 1 }
    };
    let of = |extents: u64, blobs: u64| {
        let mut layout = FileLayout::empty();
        for number in 0..extents {
            let source = Source::Blob { blob: number_of(number, blobs), offset: 0 };
            layout.write(Extent { offset: 2 * number, length: 1, source });
        }
        layout
    };
    let (one, other) = (of(5_000, 5_000), of(3_000, 700));
    check_blobs(&one, &other, "few of many");
    check_blobs(&other, &one, "many of few");
    check_blobs(&one, &FileLayout::empty(), "none");
    check_blobs(&FileLayout::empty(), &one, "of none");
    // A copy that is changed has its own, and the other one keeps its.
    let mut changed = one.clone();
    changed.write(Extent { offset: 5_000, length: 1, source: Source::Blob { blob: blob(77), offset: 0 } });
    assert_eq!(changed.blobs_at(&BTreeSet::from(["77"])).count(), 1);
    check_blobs(&changed, &one, "changed");
    check_blobs(&one, &changed, "kept");
}

/// Each write into the middle of a database moved megabytes, and each commit copied them.
#[test]
fn a_write_to_a_file_of_many_extents_leaves_all_but_a_few_where_they_are() {
    let base = dotted(500_000);
    let mut edited = base.clone();
    for number in 0..10 {
        let source = Source::Inline(Bytes::from_static(b"x"));
        edited.write(Extent { offset: number * 100_000 + 1, length: 1, source });
    }
    assert_eq!(edited.allocated(), 500_010);
    let (shared, all) = edited.extents().shared_with(base.extents());
    assert!(all > 1900 && all - shared <= 20, "{shared} of {all} chunks");
    edited.place_inline(|at, _| Source::Blob { blob: blob(7), offset: at });
    assert_eq!(edited.inline_bytes(), 0);
    let (shared, all) = edited.extents().shared_with(base.extents());
    assert!(all - shared <= 20, "{shared} of {all} chunks");
    let moved = edited.moved_into(&FileLayout::of_blob(blob(7)), &FileLayout::of_blob(blob(8)));
    let (shared, all) = moved.extents().shared_with(base.extents());
    assert!(moved != edited && all - shared <= 20, "{shared} of {all} chunks");
    let differences = base.extents().differences(moved.extents()).count();
    assert_eq!(differences, 10);
}

#[test]
fn adjacent_extents_of_one_blob_become_one() {
    let mut layout = FileLayout::empty();
    for offset in [0, 16, 8] {
        let source = Source::Blob { blob: blob(1), offset };
        layout.write(Extent { offset, length: 8, source });
    }
    assert_eq!(layout.extents().len(), 1);
}

#[test]
fn bad_extent_lists_are_refused() {
    let extent =
        |offset, length, at| Extent { offset, length, source: Source::Blob { blob: blob(1), offset: at } };
    let refused = [
        (8, vec![extent(0, 0, 0)]),
        (8, vec![extent(0, 9, 0)]),
        (16, vec![extent(8, 8, 0), extent(0, 8, 0)]),
        (16, vec![extent(0, 9, 0), extent(8, 8, 0)]),
        (u64::MAX, vec![extent(u64::MAX - 1, 8, 0)]),
        (512, vec![extent(0, 8, 2 * SPACE - 4)]),
        (8, vec![Extent { offset: 0, length: 8, source: Source::Inline(Bytes::from_static(b"short")) }]),
    ];
    for (size, extents) in refused {
        assert!(FileLayout::from_parts(size, extents.clone()).is_err(), "{extents:?}");
    }
}

#[test]
fn only_a_whole_blob_is_a_plain_object() {
    let mut layout = FileLayout::of_blob(blob(1));
    assert_eq!(layout.single_blob(), Some(&blob(1)));
    layout.truncate(SPACE);
    assert_eq!(layout.single_blob(), None);
}

#[test]
fn an_empty_object_is_remembered_until_bytes_come() {
    let empty = Blob { size: 0, ..blob(2) };
    let mut layout = FileLayout::of_blob(empty.clone());
    assert_eq!(layout.single_blob(), Some(&empty));
    assert_eq!(layout.pieces(0..10), []);
    assert_eq!((layout.next_data(0), layout.next_hole(0)), (None, 0));
    FileLayout::from_parts(0, layout.extents().to_vec()).expect("an empty object is a layout");
    layout.truncate(4);
    assert!(layout.extents().is_empty());
}

#[test]
fn an_empty_object_that_was_moved_is_followed() {
    let object = |number| FileLayout::of_blob(Blob { size: 0, ..blob(number) });
    let (base, now) = (object(2), object(3));
    assert_eq!(base.moved_into(&base, &now), now);
    let mut written = base.clone();
    written.truncate(4);
    assert_eq!(written.moved_into(&base, &now), written);
}

#[test]
fn what_was_sealed_meanwhile_is_taken_from_where_it_lies_now() {
    let extent = |offset: u64, length: u64, number: u64, at: u64| Extent {
        offset,
        length,
        source: Source::Blob { blob: blob(number), offset: at },
    };
    let mut base = FileLayout::empty();
    base.write(extent(0, 10, 1, 0));
    base.write(extent(10, 10, 2, 5));
    let mut edited = base.clone();
    edited.write(extent(5, 7, 3, 0));
    // The file's own bytes, brought to another place of it.
    edited.write(extent(30, 4, 2, 7));
    let moved = edited.moved_into(&base, &FileLayout::of_blob(blob(9)));
    let expected = |at: u64| match at {
        5..12 => Some((3, at - 5)),
        0..20 => Some((9, at)),
        30..34 => Some((9, at - 30 + 12)),
        _ => None,
    };
    assert_eq!(cells(&moved), (0..34).map(expected).collect::<Vec<_>>());
    let whole = FileLayout::of_blob(blob(9));
    assert_eq!(base.moved_into(&base, &whole).extents().len(), 1);
    let mut half = FileLayout::empty();
    half.write(extent(0, 10, 8, 3));
    half.truncate(100);
    let expected = |at: u64| if at < 10 { Some((8, at + 3)) } else { Some((2, at - 5)) };
    assert_eq!(cells(&base.moved_into(&base, &half)), (0..20).map(expected).collect::<Vec<_>>());
}

/// As [`FileLayout::moved_into`] says, one extent after another.
fn moved_one_by_one(layout: &FileLayout, base: &FileLayout, now: &FileLayout) -> FileLayout {
    let mut moved = layout.clone();
    for extent in layout.extents().iter() {
        let Source::Blob { blob, offset } = &extent.source else { continue };
        let (start, end) = (*offset, *offset + extent.length);
        let place = base.extents().iter().find_map(|held| match &held.source {
            Source::Blob { blob: same, offset } if same == blob && *offset <= start => {
                (end <= *offset + held.length).then(|| held.offset + (start - *offset))
            }
            _ => None,
        });
        let Some(range) = place.map(|at| at..at + extent.length) else { continue };
        if range.end <= now.size() && now.pieces(range.clone()).iter().all(|piece| piece.source.is_some()) {
            moved.copy(now, range, extent.offset);
        }
    }
    moved
}

#[test]
fn layouts_are_moved_as_their_extents_are() {
    for seed in 0..300 {
        println!("seed {seed}");
        let state = &mut { seed };
        let mut edits = |layout: &mut FileLayout, blobs: std::ops::Range<u64>, count: u64| {
            for _ in 0..count {
                let (start, blob_number) =
                    (next(state, SPACE), blobs.start + next(state, blobs.end - blobs.start));
                let length = 1 + next(state, SPACE - start);
                // Each byte of a blob is at one place of the file.
                let source = match next(state, 5) {
                    0 => Source::Inline(vec![blob_number as u8; length as usize].into()),
                    _ => Source::Blob { blob: blob(blob_number), offset: start },
                };
                layout.write(Extent { offset: start, length, source });
            }
        };
        let (mut base, mut now) = (FileLayout::empty(), FileLayout::empty());
        edits(&mut base, 0..3, 6);
        edits(&mut now, 10..13, 4);
        let mut edited = base.clone();
        edits(&mut edited, 0..6, 4);
        edited.punch(SPACE / 2..SPACE / 2 + 3);
        let moved = edited.moved_into(&base, &now);
        assert_eq!(cells(&moved), cells(&moved_one_by_one(&edited, &base, &now)));
        FileLayout::from_parts(moved.size(), moved.extents().to_vec()).expect("a layout");
        assert_eq!(edited.moved_into(&base, &base), edited);
    }
}

/// A file of many extents held everybody up for a minute at each fsync.
#[test]
fn a_layout_of_many_extents_is_moved() {
    let (mut base, mut now) = (FileLayout::empty(), FileLayout::empty());
    let large = |number: u64| Blob { size: 1 << 40, ..blob(number) };
    for number in 0..200_000 {
        let source = |blob: Blob, at: u64| Source::Blob { blob, offset: at };
        let (offset, at) = (number * 10, number * 20);
        base.write(Extent { offset, length: 10, source: source(large(1), at) });
        now.write(Extent { offset, length: 10, source: source(large(2 + number % 3), at) });
    }
    let mut edited = base.clone();
    edited.write(Extent { offset: 1_000, length: 10, source: Source::Inline(vec![7; 10].into()) });
    let mut expected = now.clone();
    expected.write(edited.extents().to_vec()[100].clone());
    assert!(edited.moved_into(&base, &now) == expected);
}

#[test]
fn inline_bytes_are_placed_by_their_runs() {
    let inline = |offset: u64, text: &'static str| Extent {
        offset,
        length: text.len() as u64,
        source: Source::Inline(Bytes::from_static(text.as_bytes())),
    };
    let mut layout = FileLayout::empty();
    layout.write(inline(0, "ab"));
    layout.write(inline(2, "cde"));
    layout.write(Extent { offset: 5, length: 4, source: Source::Blob { blob: blob(1), offset: 0 } });
    layout.write(inline(9, "f"));
    layout.write(inline(20, "gh"));
    let mut placed = Vec::new();
    layout.place_inline(|at, length| {
        placed.push((at, length));
        Source::Blob { blob: blob(2), offset: at }
    });
    assert_eq!(placed, [(0, 5), (5, 1), (6, 2)]);
    let expected = |at: u64| match at {
        0..5 => Some((2, at)),
        5..9 => Some((1, at - 5)),
        9 => Some((2, 5)),
        20..22 => Some((2, at - 20 + 6)),
        _ => None,
    };
    assert_eq!(cells(&layout), (0..22).map(expected).collect::<Vec<_>>());
}

/// Many short writes one after another are a few extents.
#[test]
fn short_inline_extents_are_gathered() {
    let (most, count, length) = (64 << 10, 100_000u64, 3u64);
    let mut layout = FileLayout::empty();
    let mut gathered = 0;
    for number in 0..count {
        let offset = number * length;
        let source = Source::Inline(Bytes::from(vec![number as u8; length as usize]));
        layout.write(Extent { offset, length, source });
        gathered += layout.gather_inline(offset, most);
    }
    assert_eq!(layout.extents().len() + gathered, count as usize, "each is counted once");
    assert!(layout.extents().len() < 30, "{}", layout.extents().len());
    assert!(layout.extents().iter().all(|extent| extent.length <= most));
    let expected: Vec<Cell> = (0..count * length).map(|at| Some((1000, at / length % 256))).collect();
    assert!(cells(&layout) == expected);
    layout.punch(5..10);
    assert_eq!(layout.gather_inline(10, most), 0, "there is a gap before it");
    assert_eq!(layout.gather_inline(7, most), 0, "and nothing in it");
}
