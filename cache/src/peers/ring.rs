//! Whose share a block is: rendezvous hashing (Thaler and Ravishankar, 1998). Pure.
//!
//! Every member has a score for every block, and the highest of those at hand owns it. So all hosts that know the same
//! members agree without a word, and one that joins or leaves moves its own share alone.

use super::wire::Who;
use crate::block::BlockId;

/// The member that owns a block. Those that have one share, as with disks cloned from one image, have equal scores for every
/// block: among them the process tells, for each block anew. Else all of their blocks would be the one's with the largest.
pub(super) fn owner<M>(
    members: impl IntoIterator<Item = M>,
    who: impl Fn(&M) -> Who,
    id: &BlockId,
) -> Option<M> {
    let block = mix(id.digest as u64 ^ mix((id.digest >> 64) as u64 ^ mix(id.index)));
    let score = |Who { share, process }| (mix(share ^ block), mix(process ^ block), process);
    members.into_iter().max_by_key(|member| score(who(member)))
}

/// Spreads a word over all its bits (the finalizer of SplitMix64, Steele et al., 2014).
fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(count: u8) -> Vec<u64> {
        let random = forebay_io::rng::Rng::seeded(1);
        (0..count).map(|_| random.u64()).collect()
    }

    fn owners(members: &[u64]) -> Vec<u64> {
        // Small files, of which each is a block of its own, and blocks of one large one.
        let small = (0..10_000u128).map(|file| BlockId { digest: file << 64 | file, index: 0 });
        let large = (0..10_000).map(|index| BlockId { digest: 7, index });
        let own =
            |id| owner(members, |share| Who { share: **share, process: 0 }, &id).copied().expect("somebody");
        small.chain(large).map(own).collect()
    }

    #[test]
    fn shares_are_even() {
        let members = members(16);
        for half in owners(&members).chunks(10_000) {
            for member in &members {
                let share = half.iter().filter(|owner| *owner == member).count();
                assert!((500..750).contains(&share), "{share} of 10,000 where 625 are even");
            }
        }
        assert_eq!(
            owner(
                &[] as &[u64],
                |share| Who { share: **share, process: 0 },
                &BlockId { digest: 1, index: 0 }
            ),
            None
        );
    }

    /// Hosts whose cache directories were cloned with their image left all blocks to one of them.
    #[test]
    fn members_of_one_share_are_even() {
        let processes = members(16);
        let blocks = 10_000;
        let mut owned = std::collections::HashMap::new();
        for index in 0..blocks {
            let who = |process: &&u64| Who { share: 7, process: **process };
            let owner = owner(&processes, who, &BlockId { digest: 7, index }).expect("somebody");
            *owned.entry(*owner).or_insert(0) += 1;
        }
        for process in processes {
            let share = owned.get(&process).copied().unwrap_or(0);
            assert!((500..750).contains(&share), "{share} of {blocks} where 625 are even");
        }
    }

    #[test]
    fn who_leaves_or_joins_moves_its_own_share_alone() {
        let all = members(16);
        let gone = all[5];
        let rest: Vec<u64> = all.iter().copied().filter(|member| *member != gone).collect();
        for (before, after) in owners(&all).into_iter().zip(owners(&rest)) {
            assert!(before == after || before == gone);
        }
    }

    /// Hosts of different builds have to agree.
    #[test]
    fn owners_are_who_they_were() {
        let members: Vec<u64> = (1..=5).collect();
        let owner = |digest, index| {
            *owner(&members, |share| Who { share: **share, process: 0 }, &BlockId { digest, index })
                .expect("somebody")
        };
        assert_eq!([owner(1, 0), owner(1, 1), owner(1 << 100, 0), owner(u128::MAX, 7)], [4, 2, 3, 4]);
    }
}
