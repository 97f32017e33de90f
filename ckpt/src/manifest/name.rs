//! The names of shard files: each is one save's alone, and is known before a byte was looked at.

use forebay_core::ObjectKey;

/// Hex digits of a layout in a name: it tells the few apart that one save may be tried with.
const LAYOUT_DIGITS: usize = 8;

/// Names a shard file. Its bytes are always the same: a save's slices, as the header lays them out.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ShardKey {
    /// The step.
    pub step: u64,
    /// Which start of the run wrote it.
    pub incarnation: u64,
    /// Eight hex digits of that start's nonce.
    pub attempt: String,
    /// The rank.
    pub rank: u32,
    /// The trainer's number for the save; that of a save which is sent to a second agent stays.
    pub save: u64,
    /// Eight hex digits of the header's BLAKE3: a second agent may store other slices of a save than the first.
    pub layout: String,
}

impl ShardKey {
    /// What a file that begins with `header` has in its name.
    pub fn layout_of(header: &[u8]) -> String {
        blake3::hash(header).to_hex()[..LAYOUT_DIGITS].to_owned()
    }

    /// Where it lies.
    pub fn object(&self) -> ObjectKey {
        let Self { step, incarnation, attempt, rank, save, layout } = self;
        let start = format!("{incarnation:010}-{attempt}");
        ObjectKey::new(format!("shards/{step:020}/{start}/{rank:06}-{save:06}-{layout}.safetensors"))
    }

    /// Reads a key; `None` for one that is no shard's.
    pub fn parse(key: &str) -> Option<Self> {
        let rest = key.strip_prefix("shards/")?.strip_suffix(".safetensors")?;
        let (step, rest) = rest.split_once('/')?;
        let (start, name) = rest.split_once('/')?;
        let (incarnation, attempt) = start.split_once('-')?;
        let (rank, name) = name.split_once('-')?;
        let (save, layout) = name.split_once('-')?;
        let is_hex = |text: &str| text.len() == 8 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let parsed = Self {
            step: step.parse().ok()?,
            incarnation: incarnation.parse().ok()?,
            attempt: attempt.to_owned(),
            rank: rank.parse().ok()?,
            save: save.parse().ok()?,
            layout: layout.to_owned(),
        };
        (is_hex(attempt) && is_hex(layout) && parsed.object().as_str() == key).then_some(parsed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        let (attempt, layout) = ("0a1b2c3d".to_owned(), ShardKey::layout_of(b"header"));
        let key = ShardKey { step: 500, incarnation: 3, attempt, rank: 12, save: 7, layout };
        let name = key.object().as_str().to_owned();
        assert_eq!(
            name,
            "shards/00000000000000000500/0000000003-0a1b2c3d/000012-000007-31e727dc.safetensors"
        );
        assert_eq!(ShardKey::parse(&name), Some(key));
        let others = [
            name.replace("000012", "12"),
            name.replace("0a1b2c3d", "..1b2c3d"),
            name.replace("31e727dc", "../../.."),
            name.replace("shards/", "shards//"),
            format!("/{name}"),
            format!("{name}/x"),
            "shards/x.safetensors".into(),
        ];
        for other in others {
            assert_eq!(ShardKey::parse(&other), None, "{other}");
        }
    }
}
