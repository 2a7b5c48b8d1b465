//! Serves a file as an emulated disk: `slow-disk FILE FOLDER`. [`testkit::slow_disk::SlowDisk`]
//! starts it.

use std::path::PathBuf;

fn main() {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [file, folder] = &arguments[..] else {
        eprintln!("usage: slow-disk FILE FOLDER");
        std::process::exit(2);
    };
    testkit::slow_disk::serve(file, folder);
}
