#!/bin/sh
# Installs Debian's Chromium for the tests of the pages, if it is missing. Without it those tests are skipped.
set -eu
for name in chromium chromium-browser google-chrome; do
  command -v "$name" >/dev/null && exit 0
done
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  apt-get install -y -qq --no-install-recommends chromium >/dev/null && exit 0
  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null && exit 0
fi
echo "WARNING: Chromium is not installed, so the tests of the pages are skipped. Install it: apt-get install chromium" >&2
