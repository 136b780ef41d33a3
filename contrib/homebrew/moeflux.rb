# Formula of Homebrew, for a tap: Formula/moeflux.rb in the repository moeflux/homebrew-tap.
# docs/releasing.md says how url and sha256 are set.
class Moeflux < Formula
  desc "Run Mixture-of-Experts language models that are larger than memory"
  homepage "https://github.com/moeflux/moeflux"
  url "https://github.com/moeflux/moeflux/archive/refs/tags/v0.1.0.tar.gz"
  sha256 "0000000000000000000000000000000000000000000000000000000000000000"
  license any_of: ["MIT", "Apache-2.0"]
  head "https://github.com/moeflux/moeflux.git", branch: "main"

  depends_on "rust" => :build

  def install
    system "cargo", "install", *std_cargo_args(path: "crates/cli")
    generate_completions_from_executable(bin/"moeflux", "completions")
    system bin/"moeflux", "man", man1
  end

  test do
    ENV["XDG_CACHE_HOME"] = testpath
    fable = "Tell me the fable of The Fox and the Crow."
    assert_match "Crow", shell_output("#{bin}/moeflux run --quiet '#{fable}'")
  end
end
