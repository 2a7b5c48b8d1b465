//! A terminal, and its keys.

use std::mem::ManuallyDrop;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::Duration;

use anyhow::{Result, ensure};
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::crossterm::terminal::size;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Paragraph, Wrap};
use sidecar_core::text;
use sidecar_core::trace::LayerCounts;
use signal_hook::consts::SIGHUP;

use crate::interruption;
use crate::top::facts;
use crate::top::programs::{Action, Programs};

/// How long a key is waited for until the screen is drawn again.
const TICK: Duration = Duration::from_millis(200);
/// Uses of an expert, from none to the most of its layer.
const LEVELS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// The most characters of a terminal.
const MOST_CELLS: u32 = 4_000_000;
const KEYS: &str = "q quit   Tab next program   R reload   V revert and freeze   U unfreeze";

const NOT_COUNTED: &str = "start the program with --expert-trace-stats to see its experts by layer";

/// Shows programs until a key or a signal ends it, or so many samples were taken.
pub fn show(programs: Programs, interval: Duration, samples: Option<u64>) -> Result<()> {
    check_size()?;
    let ended = programs.watch(interval, samples);
    interruption::on_signals(|signal| {
        if interruption::note(signal) {
            if signal != SIGHUP {
                return;
            }
            // A terminal that is gone has no keys, and to wait for one never ends.
            std::thread::sleep(5 * TICK);
        }
        restore();
        interruption::end_now(signal);
    })?;
    // Its end writes to standard error, and panics where that is gone.
    let mut terminal = ManuallyDrop::new(ratatui::try_init()?);
    let shown = Screen::new(programs).run(&mut terminal, &ended);
    let _ = terminal.show_cursor();
    restore();
    shown
}

/// Fails if a terminal states a size that no screen has: each cell takes memory.
fn check_size() -> Result<()> {
    let (columns, lines) = size()?;
    ensure!(
        u32::from(columns) * u32::from(lines) <= MOST_CELLS,
        "the terminal has {columns} columns and {lines} lines: use at most {MOST_CELLS} characters, or write to a file or a pipe"
    );
    Ok(())
}

/// Gives the terminal back as it was, if it is still there.
fn restore() {
    let _ = ratatui::try_restore();
}

struct Screen {
    programs: Programs,
    /// The position of the program that is shown.
    shown: usize,
    /// What the last key did.
    message: String,
    done: (Sender<String>, Receiver<String>),
}

impl Screen {
    fn new(programs: Programs) -> Screen {
        Screen {
            programs,
            shown: 0,
            message: String::new(),
            done: channel(),
        }
    }

    fn run(&mut self, terminal: &mut ratatui::DefaultTerminal, ended: &Receiver<()>) -> Result<()> {
        loop {
            if let Ok(message) = self.done.1.try_recv() {
                self.message = message;
            }
            check_size()?;
            terminal.draw(|frame| self.draw(frame))?;
            let is_ended = ended.try_recv() == Err(TryRecvError::Disconnected);
            if is_ended || interruption::signal().is_some() {
                return Ok(());
            }
            if !event::poll(TICK)? {
                continue;
            }
            let Event::Key(key) = event::read()? else {
                continue;
            };
            if key.kind != KeyEventKind::Press {
                continue;
            }
            match key.code {
                KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                    return Ok(());
                }
                KeyCode::Tab | KeyCode::Right => self.shown += 1,
                KeyCode::Char('R') => self.send(Action::Reload),
                KeyCode::Char('V') => self.send(Action::Revert),
                KeyCode::Char('U') => self.send(Action::Unfreeze),
                _ => {}
            }
        }
    }

    /// Acts on the program that is shown, on a thread: a switch may have to wait.
    fn send(&mut self, action: Action) {
        let socket = {
            let programs = self.programs.look();
            programs[self.shown % programs.len()].socket.clone()
        };
        let done = self.done.0.clone();
        let name = action.name();
        self.message = format!("{name} …");
        std::thread::spawn(move || {
            let message = match action.apply(&socket) {
                Ok(()) => format!("{name}: done"),
                Err(error) => format!("{name}: {error:#}"),
            };
            let _ = done.send(message);
        });
    }

    fn draw(&self, frame: &mut Frame) {
        let programs = self.programs.look();
        let program = &programs[self.shown % programs.len()];
        let facts: Vec<Line> = facts::of(program)
            .into_iter()
            .map(|fact| match fact.is_alarm {
                true => Line::styled(fact.text, Style::new().fg(Color::Red)),
                false => Line::raw(fact.text),
            })
            .collect();
        // Long lines are wrapped.
        let width = frame.area().width.saturating_sub(2).max(1) as usize;
        let height: usize = facts
            .iter()
            .map(|line| line.width().div_ceil(width).max(1))
            .sum();
        let height = height as u16 + 2;
        let [top, map, foot] = Layout::vertical([
            Constraint::Length(height.min(frame.area().height / 2 + 2)),
            Constraint::Min(0),
            Constraint::Length(2),
        ])
        .areas(frame.area());
        let title = format!(
            " {} ({} of {}) ",
            text::path(&program.socket),
            self.shown % programs.len() + 1,
            programs.len()
        );
        let facts = Paragraph::new(facts).wrap(Wrap { trim: false });
        frame.render_widget(facts.block(Block::bordered().title(title)), top);
        let layers = program.recent(0);
        let width = map.width.saturating_sub(8) as usize;
        let mut rows: Vec<Line> = layers.iter().map(|layer| row(layer, width)).collect();
        if rows.is_empty() {
            rows.push(Line::raw(NOT_COUNTED));
        }
        let shown = map.height.saturating_sub(2) as usize;
        if rows.len() > shown && shown > 0 {
            let more = rows.len() + 1 - shown;
            rows.truncate(shown - 1);
            rows.push(Line::raw(format!(
                "{more} more layers: the window is too low"
            )));
        }
        let block = Block::bordered().title(" experts used since the sample before, by layer ");
        frame.render_widget(Paragraph::new(rows).block(block), map);
        let keys = Line::styled(KEYS, Style::new().add_modifier(Modifier::DIM));
        frame.render_widget(Paragraph::new(vec![Line::raw(&*self.message), keys]), foot);
    }
}

/// A layer as a row of its experts; several experts are one character where the row is too short.
fn row(layer: &LayerCounts, width: usize) -> Line<'static> {
    let experts = layer.experts.len().max(1);
    let each = experts.div_ceil(width.max(1));
    let sums: Vec<u64> = layer
        .experts
        .chunks(each)
        .map(|counts| counts.iter().sum())
        .collect();
    let most = sums.iter().copied().max().unwrap_or(0).max(1);
    let level = |sum: &u64| LEVELS[(sum * (LEVELS.len() as u64 - 1)).div_ceil(most) as usize];
    let text: String = sums.iter().map(level).collect();
    Line::styled(
        format!("{:>4} {text}", layer.layer),
        Style::new().fg(Color::Cyan),
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::top::sample::{Program, Sample};

    /// What the screen shows of a program that answers this.
    fn screen(size: (u16, u16), now: Result<Sample, String>) -> String {
        let mut program = Program::new("/run/llama.sock".into());
        program.now = now.map(Arc::new);
        let screen = Screen::new(Programs::of(vec![program]));
        let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).expect("a terminal");
        terminal.draw(|frame| screen.draw(frame)).expect("memory");
        terminal.backend().to_string()
    }

    #[test]
    fn facts_and_experts_are_shown_in_windows_of_any_size() {
        let status = r#"{"pid": 7, "evaluations": 42, "generation": 3, "longest_pause_us": 5, "frozen": true,
            "waiting": {"obstacle": "evaluation", "seconds": 4.0}, "failures": {"damaged": 2},
            "no_effect": [{"requested": "streaming", "sentence": "nothing is streamed: on a GPU"}],
            "models": [{"files": ["/models/a.gguf"], "tensors": 9,
                "masks": [{"layer": 2, "experts": [1, 5]}], "loaded_bytes": {"CPU_Mapped": 1048576, "CUDA0": 3145728}, "private_bytes": 2048,
                "changed": [{"name": "t"}], "blocked": {"error": "cut off", "attempts": 3},
                "stream": {"held_bytes": 1048576}}]}"#;
        let layer = |layer| LayerCounts {
            layer,
            tokens: 1,
            experts: vec![1; 8],
            locality: None,
        };
        let sample = || Sample {
            at: std::time::Instant::now(),
            status: serde_json::from_str(status).expect("a status"),
            uses: vec![(0..30).map(layer).collect()],
        };
        let shown = screen((100, 40), Ok(sample()));
        for text in [
            "process 7: 42 evaluations",
            "3 swaps, pause at most 5 us",
            "a swap waits for 4 s: evaluation",
            "reloads are frozen",
            "a.gguf: 9 tensors, 1 swapped (2.00 KiB more)",
            "in CPU_Mapped 1.00 MiB, CUDA0 3.00 MiB",
            "2 experts of 1 layers are masked",
            "not reloaded after 3 attempts: cut off",
            "experts from disk: 1.00 MiB held",
            "nothing is streamed: on a GPU",
            "2 files or reloads not taken: damaged",
            "   0 ████████",
            "more layers: the window is too low",
            KEYS,
        ] {
            assert!(shown.contains(text), "{text}:\n{shown}");
        }
        for size in [(1, 1), (5, 3), (40, 12), (400, 100)] {
            screen(size, Ok(sample()));
        }
        let refused = screen((60, 12), Err("no program answers".into()));
        assert!(refused.contains("no program answers"), "{refused}");
        assert!(refused.contains("--expert-trace-stats"), "{refused}");
    }

    #[test]
    fn a_row_has_all_experts() {
        let layer = LayerCounts {
            layer: 7,
            tokens: 4,
            experts: vec![0, 1, 8, 4],
            locality: None,
        };
        assert_eq!(row(&layer, 10).to_string(), "   7  ▁█▄");
        assert_eq!(row(&layer, 2).to_string(), "   7 ▁█");
        assert_eq!(row(&layer, 0).to_string(), "   7 █");
        let unused = LayerCounts {
            experts: vec![0; 3],
            ..layer
        };
        assert_eq!(row(&unused, 10).to_string(), "   7    ");
    }
}
