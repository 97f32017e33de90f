//! What the ranks of a job have: which tensors, and which part of each.
//!
//! Most ranks have the same tensors, and each another part of them. What is alike is said once, as an *outline*, and each rank says
//! in numbers where its parts lie: a thousand ranks that shard thousands of tensors are told in tens of megabytes.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};

use forebay_core::{Error, Result};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::dtype::Dtype;
use crate::region::Region;

/// Who else has the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Nobody: each rank that has a tensor of the name has one of its own. Where all of them told the same bytes of it, it is one
    /// that they have alike.
    Local,
    /// Whoever names it; what the lowest of these ranks has counts.
    Lead,
    /// Whoever names it has all of it alike.
    Replicated,
    /// A part of it is here; ranks that name the same part have it alike.
    Part,
}

/// A tensor as the ranks of one outline have it.
#[derive(Debug)]
pub(crate) struct Named {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    /// Its dimensions over all ranks.
    pub(crate) shape: Vec<u64>,
    pub(crate) placement: Placement,
    /// Where in the numbers of a rank its part lies.
    at: usize,
}

#[derive(Debug)]
struct Outline {
    tensors: Vec<Named>,
    /// Numbers that tell the parts of one rank.
    numbers: usize,
}

#[derive(Debug)]
struct Entry {
    outline: usize,
    /// Of each tensor that is a part the offsets and lengths of its box.
    parts: Vec<u64>,
}

/// What all ranks have.
#[derive(Debug)]
pub struct Roster {
    outlines: Vec<Outline>,
    ranks: Vec<Entry>,
    /// Names of what each rank has for itself, and all that have it alike.
    alike: HashSet<String>,
}

/// What a rank says, beside its outline.
#[derive(Debug, Clone)]
pub struct Word {
    /// Which outline it has.
    pub outline: usize,
    /// As a JSON list of numbers the offsets and lengths of its parts, in the outline's order.
    pub parts: String,
    /// As a JSON list of pairs the numbers of tensors that it has for itself, and their bytes in any spelling: of as many of them as it
    /// likes to tell.
    pub bytes: String,
}

/// A part that one or more ranks hold.
pub(crate) struct Held<'a> {
    pub(crate) tensor: &'a Named,
    /// Offsets and lengths of its box.
    place: Cow<'a, [u64]>,
    /// Ranks, ascending, and the number of the tensor there.
    pub(crate) holders: Vec<(usize, usize)>,
}

/// What was told of the tensors of a name: of the first rank that has one, and its bytes while all others told the same.
struct Told<'a> {
    tensor: &'a Named,
    bytes: Option<String>,
    ranks: usize,
}

/// What a rank says of its tensors, beside where its parts lie.
#[derive(Deserialize)]
struct Said {
    tensors: Vec<(String, String, Vec<u64>, Placement)>,
}

impl Roster {
    /// Reads what ranks said: `outlines` as JSON, objects whose `tensors` are a list of name, element type, shape and placement
    /// each; and the word of each rank.
    ///
    /// # Errors
    /// `Invalid` for what does not fit together, and a part that lies outside of its tensor; `Unsupported` for an element type
    /// that there is not.
    pub fn read(outlines: &[String], words: &[Word]) -> Result<Self> {
        let outlines: Vec<_> =
            outlines.iter().map(|text| Outline::of(parse(text)?)).collect::<Result<_>>()?;
        let entry = |word: &Word| Ok(Entry { outline: word.outline, parts: parse(&word.parts)? });
        let ranks = words.iter().map(entry).collect::<Result<_>>()?;
        let mut roster = Self { outlines, ranks, alike: HashSet::new() };
        (0..words.len()).try_for_each(|rank| roster.check(rank))?;
        roster.alike = roster.told_alike(words)?;
        Ok(roster)
    }

    /// Names of what several ranks have, each for itself, and all of them told alike.
    fn told_alike(&self, words: &[Word]) -> Result<HashSet<String>> {
        let mut told: HashMap<&str, Told<'_>> = HashMap::new();
        for (rank, word) in words.iter().enumerate() {
            let bytes: HashMap<usize, String> = parse::<Vec<_>>(&word.bytes)?.into_iter().collect();
            let own = self.tensors_of(rank).iter().enumerate();
            for (number, tensor) in own.filter(|(_, tensor)| tensor.placement == Placement::Local) {
                let said = bytes.get(&number);
                match told.get_mut(tensor.name.as_str()) {
                    None => drop(told.insert(&tensor.name, Told { tensor, bytes: said.cloned(), ranks: 1 })),
                    Some(first) => {
                        first.ranks += 1;
                        let kinds =
                            (first.tensor.dtype, &first.tensor.shape) == (tensor.dtype, &tensor.shape);
                        first.bytes.take_if(|bytes| !kinds || Some(&*bytes) != said);
                    }
                }
            }
        }
        let alike = told.into_iter().filter(|(_, told)| told.bytes.is_some() && told.ranks > 1);
        Ok(alike.map(|(name, _)| name.to_owned()).collect())
    }

    /// Whether a tensor is each rank's own.
    pub(crate) fn is_own(&self, tensor: &Named) -> bool {
        tensor.placement == Placement::Local && !self.alike.contains(&tensor.name)
    }

    fn check(&self, rank: usize) -> Result<()> {
        let Entry { outline, parts } = &self.ranks[rank];
        let outline = self.outlines.get(*outline).filter(|outline| outline.numbers == parts.len());
        let outline =
            outline.ok_or_else(|| Error::invalid(format!("what rank {rank} has is not told whole")))?;
        for tensor in outline.tensors.iter().filter(|tensor| tensor.placement == Placement::Part) {
            if !Region::boxed(tensor.place_in(parts)).fits(&tensor.shape) {
                return Err(Error::invalid(format!("a part of tensor `{}` lies outside of it", tensor.name)));
            }
        }
        Ok(())
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.ranks.len()
    }

    /// The tensors that a rank has.
    pub(crate) fn tensors_of(&self, rank: usize) -> &[Named] {
        &self.outlines[self.ranks[rank].outline].tensors
    }

    /// Names of tensors that ranks hold together, and of which some rank has anything; all of nothing is something.
    pub fn held_together(&self) -> HashSet<&str> {
        let mut held = HashSet::new();
        for rank in 0..self.ranks.len() {
            let parts = self.tensors_of(rank).iter().filter(|tensor| tensor.placement == Placement::Part);
            for tensor in parts {
                let lengths = &tensor.place_in(&self.ranks[rank].parts)[tensor.shape.len()..];
                if !lengths.contains(&0) || tensor.shape.contains(&0) {
                    held.insert(tensor.name.as_str());
                }
            }
        }
        held
    }

    /// Gives everything that is not one rank's own, in the order of names, but for parts of tensors that are named `again`.
    ///
    /// # Errors
    /// `Invalid`, naming tensor and ranks, where two ranks disagree about a tensor that both have; what `take` gives.
    pub(crate) fn each_held<'a>(
        &'a self,
        again: &HashSet<String>,
        mut take: impl FnMut(Held<'a>) -> Result<()>,
    ) -> Result<()> {
        let mut named: BTreeMap<&str, Vec<Vec<usize>>> = BTreeMap::new();
        for (number, outline) in self.outlines.iter().enumerate() {
            let together = outline.tensors.iter().enumerate().filter(|(_, tensor)| match tensor.placement {
                Placement::Local => self.alike.contains(&tensor.name),
                Placement::Part => !again.contains(&tensor.name),
                Placement::Lead | Placement::Replicated => true,
            });
            for (index, tensor) in together {
                let places = named.entry(&tensor.name).or_default();
                places.resize_with(self.outlines.len(), Vec::new);
                places[number].push(index);
            }
        }
        named.values().try_for_each(|places| self.held_of(places)?.into_iter().try_for_each(&mut take))
    }

    /// The parts of one tensor, from its numbers in each outline.
    fn held_of(&self, numbers: &[Vec<usize>]) -> Result<Vec<Held<'_>>> {
        let mut held: Vec<Held<'_>> = Vec::new();
        let mut by_place: HashMap<Cow<'_, [u64]>, usize> = HashMap::new();
        for (rank, entry) in self.ranks.iter().enumerate() {
            for index in &numbers[entry.outline] {
                let tensor = &self.outlines[entry.outline].tensors[*index];
                let place = match tensor.placement {
                    Placement::Part => Cow::Borrowed(tensor.place_in(&entry.parts)),
                    _ => Cow::Owned([&vec![0; tensor.shape.len()], &tensor.shape[..]].concat()),
                };
                if let Some(first) = held.first() {
                    agree(first, tensor, rank)?;
                }
                match by_place.get(&place).map(|same| &mut held[*same]) {
                    // The lowest rank's counts.
                    Some(_) if tensor.placement == Placement::Lead => {}
                    Some(held) => held.holders.push((rank, *index)),
                    None => {
                        by_place.insert(place.clone(), held.len());
                        held.push(Held { tensor, place, holders: vec![(rank, *index)] });
                    }
                }
            }
        }
        Ok(held)
    }
}

impl Outline {
    fn of(said: Said) -> Result<Self> {
        let mut numbers = 0;
        let tensor = |(name, dtype, shape, placement): (String, String, Vec<u64>, Placement)| {
            let dtype = Dtype::named(&dtype)?;
            if dtype.bytes_of(&shape).is_none() {
                return Err(Error::invalid(format!(
                    "the shape {shape:?} of tensor `{name}` does not fit 64 bits"
                )));
            }
            let at = numbers;
            numbers += if placement == Placement::Part { 2 * shape.len() } else { 0 };
            Ok(Named { name, dtype, shape, placement, at })
        };
        let tensors = said.tensors.into_iter().map(tensor).collect::<Result<_>>()?;
        Ok(Self { tensors, numbers })
    }
}

impl Named {
    fn place_in<'a>(&self, parts: &'a [u64]) -> &'a [u64] {
        &parts[self.at..][..2 * self.shape.len()]
    }
}

impl Held<'_> {
    pub(crate) fn region(&self) -> Region {
        Region::boxed(&self.place)
    }

    /// Its ranks, ascending.
    pub(crate) fn ranks(&self) -> Vec<usize> {
        self.holders.iter().map(|(rank, _)| *rank).collect()
    }
}

fn agree(first: &Held<'_>, other: &Named, rank: usize) -> Result<()> {
    let one = first.tensor;
    if (one.dtype, &one.shape) == (other.dtype, &other.shape) {
        return Ok(());
    }
    let (name, first) = (&one.name, first.holders[0].0);
    let (dtype, others) = (one.dtype.name, other.dtype.name);
    Err(Error::invalid(format!(
        "tensor `{name}` is {dtype} {:?} on rank {first} and {others} {:?} on rank {rank}",
        one.shape, other.shape
    )))
}

fn parse<T: DeserializeOwned>(text: &str) -> Result<T> {
    serde_json::from_str(text)
        .map_err(|error| Error::invalid(format!("what a rank said of its tensors does not parse: {error}")))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::manifest::SliceKind;

    /// A tensor of one rank: name, type, shape, placement, and the box of a part.
    pub(crate) type Tensor = (String, &'static str, Vec<u64>, Placement, Option<Region>);

    /// What ranks say that have these tensors.
    pub(crate) fn roster(ranks: &[Vec<Tensor>]) -> Result<Roster> {
        let (outlines, words) = said(ranks);
        Roster::read(&outlines, &words)
    }

    pub(crate) fn said(ranks: &[Vec<Tensor>]) -> (Vec<String>, Vec<Word>) {
        let (mut outlines, mut said): (Vec<String>, Vec<_>) = (Vec::new(), Vec::new());
        for tensors in ranks {
            let names = tensors.iter().map(|(name, dtype, shape, placement, _)| {
                let placement = format!("{placement:?}").to_lowercase();
                serde_json::json!([name, dtype, shape, placement])
            });
            let outline = serde_json::json!({ "tensors": names.collect::<Vec<_>>(), "ties": {} }).to_string();
            let parts = tensors.iter().filter_map(|tensor| tensor.4.as_ref());
            let parts: Vec<u64> =
                parts.flat_map(|part| part.offsets.iter().chain(&part.lengths).copied()).collect();
            let number = outlines.iter().position(|other| *other == outline).unwrap_or_else(|| {
                outlines.push(outline);
                outlines.len() - 1
            });
            let parts = serde_json::to_string(&parts).expect("numbers");
            said.push(Word { outline: number, parts, bytes: "[]".into() });
        }
        (outlines, said)
    }

    #[test]
    fn what_ranks_say_wrongly_is_refused() {
        let outline = |tensors: &str| vec![format!(r#"{{"tensors":[{tensors}],"ties":{{"w":0}}}}"#)];
        let part = outline(r#"["w","float32",[8,2],"part"]"#);
        let read = |outlines: &[String], number, parts: &str| {
            let word = Word { outline: number, parts: parts.into(), bytes: "[]".into() };
            Roster::read(outlines, &[word]).map(|roster| roster.world_size())
        };
        assert_eq!(read(&part, 0, "[0,0,8,2]").expect("a part"), 1);
        for (outlines, number, parts, fact) in [
            (&part, 1, "[0,0,8,2]", "not told whole"),
            (&part, 0, "[0,0,8]", "not told whole"),
            (&part, 0, "[0,0,8,2,7]", "not told whole"),
            (&part, 0, "[1,0,8,2]", "`w` lies outside of it"),
            (&part, 0, "[18446744073709551615,0,8,2]", "`w` lies outside of it"),
            (&part, 0, "[0,0,-8,2]", "does not parse"),
            (&part, 0, "[0,0,8,2", "does not parse"),
            (&outline(r#"["w","float32",[8,2],"here"]"#), 0, "[]", "does not parse"),
            (&outline(r#"["w","float33",[8,2],"local"]"#), 0, "[]", "`float33` is not supported"),
            (&outline(r#"["w","float32",[4294967296,4294967296],"local"]"#), 0, "[]", "does not fit 64 bits"),
        ] {
            let error = read(outlines, number, parts).expect_err(fact);
            assert!(error.message().contains(fact), "`{}` does not say `{fact}`", error.message());
        }
    }

    #[test]
    fn a_part_of_nothing_is_held_where_all_of_it_is_nothing() {
        let tensor = |name: &str, shape: &[u64], lengths: &[u64]| {
            let (offsets, lengths) = (vec![0; shape.len()], lengths.to_vec());
            let part = Region { kind: SliceKind::Box, offsets, lengths };
            (name.to_owned(), "float32", shape.to_vec(), Placement::Part, Some(part))
        };
        let own = ("own".to_owned(), "float32", vec![2], Placement::Local, None);
        let one = vec![tensor("w", &[8], &[0]), tensor("none", &[0], &[0]), tensor("v", &[8], &[0]), own];
        let other = vec![tensor("w", &[8], &[8]), tensor("v", &[8], &[0])];
        let roster = roster(&[one, other]).expect("told");
        assert_eq!(roster.held_together(), HashSet::from(["w", "none"]));
    }

    #[test]
    fn what_ranks_have_for_themselves_is_one_while_all_tell_the_same() {
        let own = |name: &str, dtype| (name.to_owned(), dtype, vec![], Placement::Local, None);
        let rank = || vec![own("step", "float32"), own("place", "int64"), own("quiet", "int64")];
        let mut other = vec![own("only", "int64"), own("step", "float32"), own("cast", "int64")];
        let (outlines, mut words) = said(&[rank(), rank(), other.clone()]);
        let tell = |words: &mut [Word], rank: usize, bytes: &str| words[rank].bytes = bytes.into();
        let names = |outlines: &[String], words: &[Word]| {
            let mut names: Vec<_> = Roster::read(outlines, words).expect("told").alike.into_iter().collect();
            names.sort();
            names
        };
        tell(&mut words, 0, r#"[[0,"a"],[1,"b"]]"#);
        tell(&mut words, 1, r#"[[0,"a"],[1,"c"]]"#);
        tell(&mut words, 2, r#"[[0,"a"],[1,"a"]]"#);
        assert_eq!(names(&outlines, &words), ["step"], "others differ, are not told, or are one rank's");
        tell(&mut words, 2, r#"[[0,"a"]]"#);
        assert_eq!(names(&outlines, &words), [""; 0], "one rank tells nothing of it");
        other[2].0 = "place".into();
        other[1].1 = "float64";
        let (outlines, mut words) = said(&[rank(), other]);
        tell(&mut words, 0, r#"[[0,"a"],[1,"b"]]"#);
        tell(&mut words, 1, r#"[[1,"a"],[2,"b"]]"#);
        assert_eq!(names(&outlines, &words), ["place"], "of another type it is another tensor");
        tell(&mut words, 1, r#"[[1]]"#);
        Roster::read(&outlines, &words).expect_err("no pairs");
    }
}
