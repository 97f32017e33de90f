//! The benchmark's commands: `run` the scenarios, or be the `store` they run against.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "tables are its output, progress goes to stderr"
)]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::{Args, Parser};
use forebay_bench::context::{Context, Settings};
use forebay_bench::report;
use forebay_bench::scenarios::SCENARIOS;
use forebay_bench::store::{PaceSettings, ServerSettings, serve};
use forebay_core::units::parse_bytes;

/// Measures Forebay against the limits it aims at.
#[derive(Parser)]
enum Command {
    /// Serve an S3 store in memory until stdin closes; prints its address.
    Store(Store),
    /// Run the scenarios, print a table, write results.json.
    Run(Run),
}

#[derive(Args)]
struct Run {
    /// Only these scenarios, separated by commas.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Pairs of runs a figure.
    #[arg(long, default_value_t = 5)]
    pairs: usize,
    /// Small files in a data set.
    #[arg(long, default_value_t = 20_000)]
    files: usize,
    /// Size of a large file.
    #[arg(long, default_value = "1GiB", value_parser = parse_bytes)]
    large: u64,
    /// Bytes of the state that the checkpoint scenario saves and restores.
    #[arg(long, default_value = "2GiB", value_parser = parse_bytes)]
    state: u64,
    /// Bytes that the memory scenario reads, and that it writes.
    #[arg(long, default_value = "10GiB", value_parser = parse_bytes)]
    volume: u64,
    /// Of the checkpoint scenario only these parts.
    #[arg(long, value_delimiter = ',', value_parser = ["store", "link", "disk", "near", "training"])]
    parts: Vec<String>,
    /// The forebay binary [default: beside this one].
    #[arg(long)]
    forebay: Option<PathBuf>,
    /// A Python interpreter with torch and forebay.
    #[arg(long, default_value = "python3")]
    python: PathBuf,
    /// The juicefs binary to compare with.
    #[arg(long)]
    juicefs: Option<PathBuf>,
    /// Scratch folder, on the disk to compare with.
    #[arg(long, default_value = "/var/tmp")]
    work: PathBuf,
    /// Where the results go.
    #[arg(long, default_value = "bench/out/results.json")]
    out: PathBuf,
}

#[derive(Args)]
struct Store {
    /// A bucket that is there from the start.
    #[arg(long)]
    bucket: Vec<String>,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: String,
    /// Milliseconds before each answer.
    #[arg(long, default_value_t = 0)]
    delay_ms: u64,
    /// Bytes a second over all connections.
    #[arg(long)]
    rate: Option<u64>,
    /// Bytes a second of one request.
    #[arg(long)]
    request_rate: Option<u64>,
}

fn main() -> Result<()> {
    match Command::parse() {
        Command::Store(store) => serve_store(store),
        Command::Run(run) => run_scenarios(run),
    }
}

fn run_scenarios(run: Run) -> Result<()> {
    let beside = std::env::current_exe()?.with_file_name("forebay");
    let settings = Settings {
        pairs: run.pairs,
        files: run.files,
        large: run.large,
        state: run.state,
        volume: run.volume,
        parts: run.parts,
        forebay: run.forebay.unwrap_or(beside),
        python: run.python,
        juicefs: run.juicefs,
        work: run.work,
    };
    if let Some(unknown) = run.only.iter().find(|name| SCENARIOS.iter().all(|known| known.name != *name)) {
        let known: Vec<&str> = SCENARIOS.iter().map(|scenario| scenario.name).collect();
        bail!("no scenario `{unknown}`; there are {}", known.join(", "));
    }
    let mut failed = Vec::new();
    let chosen = |name: &str| run.only.is_empty() || run.only.iter().any(|only| only == name);
    for scenario in SCENARIOS.iter().filter(|scenario| chosen(scenario.name)) {
        let context = Context::new(settings.clone())?;
        let start = Instant::now();
        eprintln!("{}: running", scenario.name);
        match scenario.run(&context) {
            Ok(rows) => {
                println!("{}", report::table(&rows));
                report::write(&run.out, &report::merge(report::read(&run.out)?, rows))?;
            }
            Err(error) => {
                eprintln!("{}: failed: {error:#}", scenario.name);
                failed.push(scenario.name);
            }
        }
        eprintln!("{}: {:.0} s", scenario.name, start.elapsed().as_secs_f64());
    }
    if failed.is_empty() { Ok(()) } else { bail!("these scenarios failed: {}", failed.join(", ")) }
}

fn serve_store(store: Store) -> Result<()> {
    let pace = PaceSettings {
        delay: Duration::from_millis(store.delay_ms),
        rate: store.rate,
        request_rate: store.request_rate,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind(&store.listen).await?;
        println!("{}", listener.local_addr()?);
        let closed =
            tokio::task::spawn_blocking(|| std::io::copy(&mut std::io::stdin(), &mut std::io::sink()));
        tokio::select! {
            ended = serve(listener, ServerSettings { buckets: store.bucket, pace }) => ended,
            _ = closed => Ok(()),
        }
    })
}
