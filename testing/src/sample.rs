//! Lists of combinations that tests go through: a sample of them, or all.

/// Returns every second combination, from the first on for an even number and from the second on for an odd one; with
/// `SHARDGRAD_COMBINATIONS=all` every one. A test that goes through one list for several models passes different
/// numbers, so that its models share the list.
pub fn sample<T>(number: usize, all: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    let is_full = std::env::var("SHARDGRAD_COMBINATIONS").is_ok_and(|value| value == "all");
    let chosen = all.into_iter().enumerate().filter(move |(i, _)| is_full || (i + number).is_multiple_of(2));
    chosen.map(|(_, one)| one)
}
