{
  description = "Runs Mixture-of-Experts language models that are larger than memory";

  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixpkgs-unstable";

  outputs =
    { self, nixpkgs }:
    let
      systems = [
        "x86_64-linux"
        "aarch64-linux"
        "aarch64-darwin"
      ];
      forEachSystem = build: nixpkgs.lib.genAttrs systems (system: build nixpkgs.legacyPackages.${system});
      manifest = (builtins.fromTOML (builtins.readFile ./Cargo.toml)).workspace.package;
    in
    {
      packages = forEachSystem (
        pkgs:
        let
          inherit (pkgs) lib;
        in
        {
          default = pkgs.rustPlatform.buildRustPackage {
            pname = "moeflux";
            inherit (manifest) version;
            src = self;
            cargoLock.lockFile = ./Cargo.lock;
            cargoBuildFlags = [
              "-p"
              "moeflux-cli"
            ];
            # scripts/test.sh runs the tests; they need drivers and a C++ compiler.
            doCheck = false;

            nativeBuildInputs = [ pkgs.installShellFiles ] ++ lib.optional pkgs.stdenv.isLinux pkgs.makeWrapper;
            postInstall = ''
              $out/bin/moeflux man man1
              installManPage man1/*
              installShellCompletion --cmd moeflux \
                --bash <($out/bin/moeflux completions bash) \
                --zsh <($out/bin/moeflux completions zsh) \
                --fish <($out/bin/moeflux completions fish)
            ''
            # The Vulkan loader is opened at run time.
            + lib.optionalString pkgs.stdenv.isLinux ''
              wrapProgram $out/bin/moeflux \
                --prefix LD_LIBRARY_PATH : ${lib.makeLibraryPath [ pkgs.vulkan-loader ]}
            '';

            meta = {
              description = "Runs Mixture-of-Experts language models that are larger than memory";
              homepage = manifest.repository;
              license = with lib.licenses; [
                mit
                asl20
              ];
              mainProgram = "moeflux";
            };
          };
        }
      );

      devShells = forEachSystem (pkgs: {
        default = pkgs.mkShell {
          packages = with pkgs; [
            cargo
            clippy
            rustc
            rustfmt
          ];
        };
      });
    };
}
