//! Where log lines go: stderr, which is the log file of a mount in the background.

use std::io::IsTerminal;

use forebay_core::{Error, Result};
use tracing_subscriber::EnvFilter;

/// Without `--log`: Forebay's own lifecycle, and of libraries what went wrong; of the FUSE library nothing, since it
/// takes a caller that did not wait for its answer for an error.
const DEFAULT: &str = "warn,fuser=off,forebay=info,forebay_fuse=info,forebay_volume=info,forebay_metadata=info,\
                       forebay_cache=info,forebay_io=info";

/// Starts logging. `json` writes one JSON object a line.
pub(crate) fn start(filter: Option<&str>, json: bool) -> Result<()> {
    let filter = EnvFilter::try_new(filter.unwrap_or(DEFAULT)).map_err(|error| {
        Error::invalid(format!("log level does not parse: {error}"))
            .with_hint("write error, warn, info, debug or trace")
    })?;
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match json {
        true => lines.json().try_init(),
        false => lines.with_ansi(std::io::stderr().is_terminal()).try_init(),
    };
    started.map_err(|error| Error::bug(format!("logging was started twice: {error}")))
}
