//! Sizes in bytes, times, shares, and tables, as reports read and write them.

use std::fmt::Write;
use std::time::Duration;

use sidecar_core::text;

/// The most seconds that an option takes: what a clock can add.
const LONGEST: f64 = 1e9;

/// Returns a number and its unit, as text; the unit may be empty.
pub fn number_and_unit(text: &str) -> (&str, &str) {
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    text.split_at(number.len())
}

/// Reads a size: `24G` or `24GiB` in powers of 1024, `24GB` in powers of 1000; also K, M and T.
pub fn size(text: &str) -> Result<u64, String> {
    let (number, unit) = number_and_unit(text);
    let power = |letters: &str| "KMGT".find(letters).map(|at| at as i32 + 1);
    let factor = match unit.strip_suffix("iB").or(unit.strip_suffix('B')) {
        _ if unit.is_empty() || unit == "B" => Some(1.0),
        Some(letter) if letter.len() == 1 && !unit.ends_with("iB") => {
            power(letter).map(|power| 1000f64.powi(power))
        }
        Some(letter) if letter.len() == 1 => power(letter).map(|power| 1024f64.powi(power)),
        None if unit.len() == 1 => power(unit).map(|power| 1024f64.powi(power)),
        _ => None,
    };
    let number = number.parse::<f64>().ok();
    let bytes = number.zip(factor).map(|(number, factor)| number * factor);
    let bytes = bytes.filter(|bytes| *bytes >= 1.0 && *bytes < 1e18);
    bytes
        .map(|bytes| bytes as u64)
        .ok_or_else(|| format!("expected a size such as 24G, 24GiB, 24GB or 512M, found '{text}'"))
}

/// Returns the microseconds of a unit of times.
pub fn microseconds(unit: &str) -> Option<f64> {
    Some(match unit {
        "us" | "microseconds" => 1.0,
        "ms" | "milliseconds" => 1e3,
        "s" | "seconds" => 1e6,
        "m" | "minutes" => 6e7,
        "h" => 3.6e9,
        _ => return None,
    })
}

/// Reads a time of at most 30 years: `2s`, `500ms`, `5m`, `1h`. A number alone is in seconds.
pub fn time(text: &str) -> Result<Duration, String> {
    let (number, unit) = number_and_unit(text);
    let unit = if unit.is_empty() { "s" } else { unit };
    let seconds = number.parse::<f64>().ok().zip(microseconds(unit));
    let seconds = seconds.map(|(number, unit)| number * unit / 1e6);
    let time = seconds.filter(|seconds| *seconds <= LONGEST);
    let time = time.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.filter(|time| !time.is_zero())
        .ok_or_else(|| format!("expected a time such as 2s, 500ms, 5m or 1h, found '{text}'"))
}

/// Reads a share: `40%`.
pub fn share(text: &str) -> Result<f64, String> {
    let percent = text
        .strip_suffix('%')
        .and_then(|number| number.parse::<f64>().ok());
    let percent = percent.filter(|percent| *percent > 0.0 && *percent <= 100.0);
    percent.map(|percent| percent / 100.0).ok_or_else(|| {
        format!("expected a share above 0 % and up to 100 %, such as 40%, found '{text}'")
    })
}

/// Returns a size with three or four digits and its unit.
pub fn size_text(bytes: f64) -> String {
    let mut size = bytes;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if size < 1000.0 {
            let digits = match size {
                _ if unit == "B" => 0,
                size if size < 10.0 => 2,
                _ => 1,
            };
            return format!("{size:.digits$} {unit}");
        }
        size /= 1024.0;
    }
    format!("{size:.2} TiB")
}

/// Returns a share in percent.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// A table with a row of heads.
pub struct Table {
    /// The names of the columns.
    pub head: Vec<String>,
    /// The cells.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// Makes an empty table.
    pub fn new<'a>(head: impl IntoIterator<Item = &'a str>) -> Table {
        Table {
            head: head.into_iter().map(str::to_owned).collect(),
            rows: Vec::new(),
        }
    }

    /// Returns the table for a terminal, aligned to the right.
    pub fn as_text(&self) -> String {
        let plain = |cells: &Vec<String>| {
            cells
                .iter()
                .map(|cell| text::line(cell).into_owned())
                .collect()
        };
        let lines = std::iter::once(&self.head).chain(&self.rows).map(plain);
        let lines: Vec<Vec<String>> = lines.collect();
        let width = |column: usize| {
            lines
                .iter()
                .map(|cells| cells[column].chars().count())
                .max()
        };
        let mut text = String::new();
        for cells in &lines {
            for (column, cell) in cells.iter().enumerate() {
                let gap = if column == 0 { "" } else { "  " };
                let _ = write!(text, "{gap}{cell:>0$}", width(column).unwrap_or(0));
            }
            text.push('\n');
        }
        text
    }

    /// Returns the table for a page.
    pub fn as_html(&self) -> String {
        let row = |cells: &[String], tag: &str| {
            let cells = cells
                .iter()
                .map(|cell| format!("<{tag}>{}", text::html(cell)));
            format!("<tr>{}</tr>", cells.collect::<String>())
        };
        let rows = self.rows.iter().map(|cells| row(cells, "td"));
        format!(
            "<table>{}{}</table>",
            row(&self.head, "th"),
            rows.collect::<String>()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_both_systems() {
        let read = ["24G", "1.5MiB", "7GB", "3K", "12", "5B"].map(|text| size(text).expect(text));
        assert_eq!(read, [24 << 30, 3 << 19, 7_000_000_000, 3072, 12, 5]);
        for text in [
            "", "G", "-1G", "24X", "24GG", "24iB", "NaN", "inf", "1e30", "0",
        ] {
            assert!(size(text).is_err(), "{text}");
        }
        assert_eq!(share("40%"), Ok(0.4));
        for text in ["40", "0%", "101%", "%", "NaN%"] {
            assert!(share(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_are_read_with_their_unit() {
        let read = ["2s", "0.5", "250ms", "5m", "1.5h"].map(|text| time(text).expect(text));
        assert_eq!(
            read.map(|of| of.as_millis()),
            [2000, 500, 250, 300_000, 5_400_000]
        );
        for text in [
            "", "0", "-1s", "s", "5x", "5 m", "nan", "inf", "1e300", "2e9", "a",
        ] {
            assert!(time(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_written_with_few_digits() {
        let written = [5.0, 1536.0, 1e9, 25769803776.0, 5e12].map(size_text);
        assert_eq!(
            written,
            ["5 B", "1.50 KiB", "953.7 MiB", "24.0 GiB", "4.55 TiB"]
        );
    }
}
