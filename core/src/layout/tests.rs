//! Layout edits against a plain array of bytes.

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

fn check_seed(seed: u64) {
    let mut state = seed;
    let mut layout = FileLayout::empty();
    let mut model: Vec<Cell> = Vec::new();
    for step in 0..200 {
        let start = next(&mut state, SPACE);
        let end = start + 1 + next(&mut state, SPACE - start);
        match next(&mut state, 6) {
            0 | 1 => {
                let number = next(&mut state, 3);
                // Sometimes at the same place in the blob as in the file, so that neighbours merge.
                let offset = if next(&mut state, 2) == 0 { start } else { next(&mut state, SPACE) };
                let source = Source::Blob { blob: blob(number), offset };
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
                    model[at as usize] = Some((1000, at));
                }
            }
            3 => {
                let to = next(&mut state, SPACE);
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
            _ => {
                layout.truncate(start);
                model.resize(start as usize, None);
            }
        }
        assert_eq!(cells(&layout), model, "seed {seed} step {step}");
        FileLayout::from_parts(layout.size(), layout.extents().to_vec())
            .unwrap_or_else(|error| panic!("seed {seed} step {step}: {error}"));
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
    assert_eq!(layout.extents(), []);
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
    for extent in layout.extents() {
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
    expected.write(edited.extents()[100].clone());
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
