//! Short cases out of long ones: what a failure does not need is left out (delta debugging).

/// The shortest part of `sequence` that was found to fail, in its order, after at most `most_runs` calls of `fails`. It is
/// `sequence` itself, which is known to fail, where nothing can be left out.
///
/// Leaves out halves, then quarters, and so on down to single items; what is left when no single one can go needs all
/// of them.
pub fn shrink<T: Clone>(sequence: &[T], most_runs: usize, mut fails: impl FnMut(&[T]) -> bool) -> Vec<T> {
    let mut left = sequence.to_vec();
    let mut length = left.len().div_ceil(2);
    let mut runs = 0;
    while length > 0 {
        let (before, mut at) = (left.len(), 0);
        while at < left.len() {
            if runs == most_runs {
                return left;
            }
            runs += 1;
            let end = (at + length).min(left.len());
            let without = [&left[..at], &left[end..]].concat();
            match fails(&without) {
                true => left = without,
                false => at = end,
            }
        }
        length = match length {
            // What went may have been what others were needed with.
            1 if left.len() < before => 1,
            1 => 0,
            _ => length.div_ceil(2),
        };
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a hundred numbers, those that `needed` asks for are left, and no more than `most` runs are made.
    fn check(needed: impl Fn(&[u32]) -> bool, expected: &[u32], most: usize) {
        let mut runs = 0;
        let all: Vec<u32> = (0..100).collect();
        let found = shrink(&all, most, |part| {
            runs += 1;
            needed(part)
        });
        assert_eq!(found, expected, "after {runs} runs");
        assert!(runs <= most, "{runs} runs");
    }

    #[test]
    fn only_what_a_failure_needs_is_left() {
        check(|part| part.contains(&42), &[42], 30);
        check(|part| [3, 17, 90].iter().all(|one| part.contains(one)), &[3, 17, 90], 60);
        check(|_| true, &[], 10);
        // Only together can 10 and 11 go.
        check(|part| part.contains(&5) && part.contains(&10) == part.contains(&11), &[5], 40);
        let all: Vec<u32> = (0..100).collect();
        let part = shrink(&all, 1000, |part| part.iter().sum::<u32>() >= 4000);
        let (sum, least) = (part.iter().sum::<u32>(), part.iter().min().expect("some are left"));
        assert!(sum >= 4000 && sum - least < 4000, "{part:?}");
    }

    #[test]
    fn what_needs_everything_stays_and_runs_are_bounded() {
        check(|_| false, &(0..100).collect::<Vec<_>>(), 300);
        let all: Vec<u32> = (0..100).collect();
        assert_eq!(shrink(&all, 0, |_| panic!("no run is left")), all);
        let mut runs = 0;
        let part = shrink(&all, 7, |part| {
            runs += 1;
            part.contains(&42)
        });
        assert!(runs == 7 && part.contains(&42) && part.len() < 20, "{part:?}");
        assert!(shrink(&[] as &[u32], 10, |_| true).is_empty());
    }
}
