//! The spelling of keys.

use forebay_core::ObjectKey;

/// Names one manifest.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StepKey {
    /// Which start of the run wrote it.
    pub incarnation: u64,
    /// The step.
    pub step: u64,
    /// Eight hex digits of that start's nonce.
    pub attempt: String,
}

impl StepKey {
    /// The prefix of all manifests.
    pub const PREFIX: &'static str = "steps";

    /// Where the manifest lies.
    pub fn object(&self) -> ObjectKey {
        let Self { incarnation, step, attempt } = self;
        ObjectKey::new(format!("{}/{step:020}/{incarnation:010}-{attempt}.json", Self::PREFIX))
    }

    /// Reads a key; `None` for one that is no manifest's.
    pub fn parse(key: &ObjectKey) -> Option<Self> {
        let rest = key.as_str().strip_prefix(Self::PREFIX)?.strip_prefix('/')?;
        let (step, name) = rest.split_once('/')?;
        let (incarnation, attempt) = name.strip_suffix(".json")?.split_once('-')?;
        let parsed = Self {
            step: step.parse().ok()?,
            incarnation: incarnation.parse().ok()?,
            attempt: attempt.to_owned(),
        };
        (parsed.object() == *key).then_some(parsed)
    }
}

/// The prefix of the records of a run's starts.
pub(super) const RUNS: &str = "runs";

/// Where the record of one start of the run lies.
pub fn incarnation_key(incarnation: u64) -> ObjectKey {
    ObjectKey::new(format!("{RUNS}/{incarnation:010}.json"))
}

/// Reads such a key; `None` for any other.
pub(super) fn parse_incarnation(key: &ObjectKey) -> Option<u64> {
    let number = key.as_str().strip_prefix(RUNS)?.strip_prefix('/')?.strip_suffix(".json")?.parse().ok()?;
    (incarnation_key(number) == *key).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_round_trip() {
        let key = StepKey { incarnation: 3, step: 500, attempt: "0a1b2c3d".into() };
        assert_eq!(key.object().as_str(), "steps/00000000000000000500/0000000003-0a1b2c3d.json");
        assert_eq!(StepKey::parse(&key.object()), Some(key));
        for other in ["steps/500/3-a.json", "steps/x", "steps/00000000000000000500/0000000003.json", "a"] {
            assert_eq!(StepKey::parse(&ObjectKey::new(other)), None, "{other}");
        }
        assert_eq!(incarnation_key(12).as_str(), "runs/0000000012.json");
        assert_eq!(parse_incarnation(&incarnation_key(12)), Some(12));
        assert_eq!(parse_incarnation(&ObjectKey::new("runs/12.json")), None);
    }
}
