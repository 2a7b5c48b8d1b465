//! The expert cache that llama.cpp has of its own, in the command of a program.
//!
//! It would take memory for the experts that `--expert-cache` keeps on the device, and only one of the
//! two can work. So a command loses it, and its memory goes to `--expert-cache`.

use std::ffi::{OsStr, OsString};

/// The option of llama.cpp's programs that sets its size, in MiB.
const OPTION: &str = "--moe-cache-mib";

/// The variable that sets it where the option is not given.
pub const VARIABLE: &str = "LLAMA_ARG_MOE_CACHE_MIB";

/// Removes the option from a command. Returns the MiB that it had, or that the environment has; `None`
/// if the program would have no cache of its own.
pub fn remove(command: &mut Vec<OsString>) -> Option<u32> {
    remove_from(command, std::env::var_os(VARIABLE).as_deref())
}

fn remove_from(command: &mut Vec<OsString>, variable: Option<&OsStr>) -> Option<u32> {
    let number = |word: &OsStr| word.to_str()?.parse().ok();
    let mut mib = variable.and_then(number);
    let mut at = 1;
    while at + 1 < command.len() {
        match number(&command[at + 1]).filter(|_| command[at] == OPTION) {
            Some(value) => {
                mib = Some(value);
                command.drain(at..at + 2);
            }
            None => at += 1,
        }
    }
    mib.filter(|mib| *mib > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(command: &str, variable: Option<&str>, left: &str, mib: Option<u32>) {
        let mut words: Vec<OsString> = command.split(' ').map(OsString::from).collect();
        assert_eq!(remove_from(&mut words, variable.map(OsStr::new)), mib);
        assert_eq!(words.join(OsStr::new(" ")), left);
    }

    #[test]
    fn the_last_size_counts_as_in_llama_cpp() {
        check("server -m x", None, "server -m x", None);
        check(
            "server --moe-cache-mib 20 -m x",
            None,
            "server -m x",
            Some(20),
        );
        check(
            "s --moe-cache-mib 1 --moe-cache-mib 2",
            Some("3"),
            "s",
            Some(2),
        );
        check("s --moe-cache-mib 0", Some("3"), "s", None);
        check("s", Some("3"), "s", Some(3));
    }

    /// The program reports the error itself.
    #[test]
    fn what_is_no_size_stays() {
        let commands = [
            "s --moe-cache-mib",
            "s --moe-cache-mib x",
            "s --moe-cache-mib -1",
        ];
        for command in commands {
            check(command, Some("x"), command, None);
        }
    }
}
