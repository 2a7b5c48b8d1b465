//! Another user beside the run, and clients that only disturb.
//!
//! The user plants links to a file that is not his, and FIFOs, at every name that can be guessed in
//! the folders of the run, which all users can write. [`testkit::host::disturb`] has the clients.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use super::failures::Failures;

/// The user, if this process may start programs of other users.
const USER: u32 = 65534;
/// Clients of the control socket.
pub const CLIENTS: usize = 64;
/// The pause between two connections of a client, which leaves some of the processors to the server.
pub const PAUSE: Duration = Duration::from_millis(50);
/// The content of the file that is not the user's.
const PRECIOUS: &str = "precious";
/// Plants what is missing, again and again. `$1` is the target of the links, `$2` the process, the
/// others are folders.
const PLANT: &str = r#"
target=$1 process=$2; shift 2
while :; do
    for folder in "$@"; do
        for name in t.json s.json r.routes model.gguf; do
            for end in .tmp .part .new '.~1~' '.~2~' '.~9~' .lock .marks.jsonl .weights.npy; do
                ln -s "$target" "$folder/$name$end"
                ln -s "$target" "$folder/.$name$end"
            done
            for number in 0 1 2 3 4 5 6 7 8 9; do
                ln -s "$target" "$folder/$name.$process-$number.part"
            done
            mkfifo "$folder/.$name.swap-x" "$folder/.$name.x.part"
        done
    done 2>/dev/null
    sleep 1
done"#;

/// The folder of outputs, and the user who plants files in it.
pub struct Hostile {
    folder: tempfile::TempDir,
    precious: PathBuf,
    child: Option<Child>,
}

impl Hostile {
    /// Makes a folder that all users can write, as `/tmp` is.
    pub fn new() -> Result<Hostile> {
        let folder = tempfile::tempdir()?;
        let precious = folder.path().join("precious");
        fs::write(&precious, PRECIOUS)?;
        fs::set_permissions(&precious, Permissions::from_mode(0o666))?;
        let outputs = folder.path().join("outputs");
        fs::create_dir(&outputs)?;
        for path in [folder.path(), &outputs] {
            share(path)?;
        }
        Ok(Hostile {
            folder,
            precious,
            child: None,
        })
    }

    /// Returns the folder of outputs.
    pub fn outputs(&self) -> PathBuf {
        self.folder.path().join("outputs")
    }

    /// Starts to plant files in the folder of outputs and in that of a model.
    pub fn plant(&mut self, process: u32, model: &Path) -> Result<()> {
        let folder = model.parent().context("a folder")?;
        share(folder)?;
        let mut command = Command::new("sh");
        command
            .args(["-c", PLANT, "sh"])
            .arg(&self.precious)
            .arg(process.to_string())
            .args([self.outputs(), folder.to_owned()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .uid(USER)
            .gid(USER);
        self.child = command.spawn().ok();
        Ok(())
    }

    /// Ends it; returns what it did, and adds what was written through its links.
    pub fn end(mut self, failures: &Failures) -> Result<String> {
        let Some(mut child) = self.child.take() else {
            return Ok("not run: only root starts programs of other users".into());
        };
        child.kill()?;
        child.wait()?;
        if fs::read_to_string(&self.precious)? != PRECIOUS {
            failures.add(
                "files written through links",
                self.precious.display().to_string(),
            );
        }
        let mut planted = 0;
        for entry in fs::read_dir(self.outputs())? {
            let entry = entry?;
            let found = fs::symlink_metadata(entry.path())?;
            planted += u64::from(!found.is_file());
        }
        if planted == 0 {
            failures.add("files of the other user", "expected some, found none");
        }
        Ok(format!("{planted} in the folder of outputs"))
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn share(folder: &Path) -> Result<()> {
    let mode = Permissions::from_mode(0o1777);
    Ok(File::open(folder)?.set_permissions(mode)?)
}
