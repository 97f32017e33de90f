//! Where log lines go: stderr, which is the log file of a mount in the background; the warnings of its start also go
//! to the terminal that it was started from.

mod file;

use std::fmt::{Debug, Write as _};
use std::io::IsTerminal;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use forebay_core::{Error, Result};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::{LevelFilter, filter_fn};
use tracing_subscriber::fmt::writer::BoxMakeWriter;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

use self::file::LogFile;

/// Without `--log`: Forebay's own lifecycle, and of libraries what went wrong; of the FUSE library nothing, since it
/// takes a caller that did not wait for its answer for an error.
const DEFAULT: &str = "warn,fuser=off,forebay=info,forebay_fuse=info,forebay_volume=info,forebay_metadata=info,\
                       forebay_cache=info,forebay_io=info";
/// The most warnings that are kept for the terminal. The log has them all.
const WARNINGS_MAX: usize = 32;

/// Starts logging. `json` writes one JSON object a line.
pub(crate) fn start(filter: Option<&str>, json: bool) -> Result<()> {
    begin(filter, json, BoxMakeWriter::new(std::io::stderr), None)
}

/// Starts logging to the file that is stderr, and keeps Forebay's own warnings for the terminal, whatever `filter` lets into the
/// log. They stop being kept when what was returned is dropped.
pub(crate) fn start_keeping_warnings(filter: Option<&str>) -> Result<Warnings> {
    let (sender, receiver) = sync_channel(WARNINGS_MAX);
    let writer = LogFile::of_stderr().map_or_else(|| BoxMakeWriter::new(std::io::stderr), BoxMakeWriter::new);
    begin(filter, false, writer, Some(Keep(sender)))?;
    Ok(Warnings(receiver))
}

fn begin(filter: Option<&str>, json: bool, writer: BoxMakeWriter, keep: Option<Keep>) -> Result<()> {
    let filter = parse(filter.unwrap_or(DEFAULT))?;
    let lines = tracing_subscriber::fmt::layer().with_writer(writer);
    let lines = match json {
        true => lines.json().with_filter(filter).boxed(),
        false => lines.with_ansi(std::io::stderr().is_terminal()).with_filter(filter).boxed(),
    };
    let own = |level: &Level, target: &str| *level <= Level::WARN && target.starts_with("forebay");
    let keep = keep
        .map(|keep| keep.with_filter(filter_fn(move |metadata| own(metadata.level(), metadata.target()))));
    tracing_subscriber::registry()
        .with(lines)
        .with(keep)
        .try_init()
        .map_err(|error| Error::bug(format!("logging was started twice: {error}")))
}

/// A level, or several of TARGET=LEVEL. A word alone is a level: the library takes any other for a target, and then logs
/// nothing else, and nothing of that.
fn parse(text: &str) -> Result<EnvFilter> {
    let refused = |why: String| {
        Error::invalid(format!("log level `{text}` does not parse: {why}")).with_hint(
            "write error, warn, info, debug, trace or off, or as in `warn,forebay_io=debug` for parts",
        )
    };
    let words = text.split(',').map(str::trim).filter(|word| !word.is_empty() && !word.contains(['=', '[']));
    for word in words {
        word.parse::<LevelFilter>().map_err(|_| refused(format!("`{word}` is no level")))?;
    }
    EnvFilter::try_new(text).map_err(|error| refused(error.to_string()))
}

/// Warnings since logging was started.
#[derive(Debug)]
pub(crate) struct Warnings(Receiver<String>);

impl Warnings {
    /// Those that came so far.
    pub(crate) fn take(&self) -> Vec<String> {
        self.0.try_iter().collect()
    }
}

/// Sends events as text, and drops those for which there is no place.
struct Keep(SyncSender<String>);

impl<S: Subscriber> Layer<S> for Keep {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut text = Text::default();
        event.record(&mut text);
        // Full, or nobody waits any more: the log has it.
        let _ = self.0.try_send(text.message + &text.fields);
    }
}

/// An event as `message (name=value) (name=value)`.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " ({name}={value:?})"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_level_is_told() {
        for good in ["debug", "WARN", "off", "3", "warn,forebay_io=debug", "forebay[span]=trace", DEFAULT, ""]
        {
            assert!(parse(good).is_ok(), "{good}");
        }
        for wrong in ["debgu", "info,verbose", "forebay_io=debgu", "6"] {
            let told = parse(wrong).expect_err(wrong);
            assert!(told.message().contains(wrong) && told.hint().is_some(), "{told}");
        }
    }

    #[test]
    fn warnings_are_kept_as_text_up_to_a_bound() {
        let (sender, receiver) = sync_channel(2);
        let warnings = Warnings(receiver);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(Keep(sender)), || {
            let url = "s3://b";
            tracing::warn!(%url, keys = 3, "left out");
            for _ in 0..5 {
                tracing::warn!("again");
            }
        });
        assert_eq!(warnings.take(), ["left out (url=s3://b) (keys=3)", "again"]);
    }
}
