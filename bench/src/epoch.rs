//! The client of the read scenarios: plain threads that open, read and close files, or look at all of them.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result};

/// Reads every file once with so many threads; returns the bytes read.
pub fn read_all(paths: &[PathBuf], threads: usize) -> Result<f64> {
    let next = AtomicUsize::new(0);
    let worker = || -> Result<u64> {
        let (mut buffer, mut bytes) = (vec![0; 1 << 17], 0);
        while let Some(path) = paths.get(next.fetch_add(1, Ordering::Relaxed)) {
            bytes += read(path, &mut buffer)?;
        }
        Ok(bytes)
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        let mut bytes = 0;
        for worker in workers {
            bytes += worker.join().map_err(|_| anyhow::anyhow!("a reader panicked"))??;
        }
        Ok(bytes as f64)
    })
}

/// Reads one file front to back in pieces of 1 MiB; returns the bytes read.
pub fn read_one(path: &Path) -> Result<f64> {
    Ok(read(path, &mut vec![0; 1 << 20])? as f64)
}

/// Looks at everything below a folder as `ls -lR` does; returns the files found.
pub fn walk(folder: &Path) -> Result<f64> {
    let mut files = 0.0;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        files += if entry.metadata()?.is_dir() { walk(&entry.path())? } else { 1.0 };
    }
    Ok(files)
}

fn read(path: &Path, buffer: &mut [u8]) -> Result<u64> {
    let named = || format!("reading {}", path.display());
    let mut file = File::open(path).with_context(named)?;
    let mut bytes = 0;
    loop {
        match file.read(buffer).with_context(named)? {
            0 => return Ok(bytes),
            count => bytes += count as u64,
        }
    }
}
