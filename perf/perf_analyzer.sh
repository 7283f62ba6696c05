#!/usr/bin/env bash
# Runs perf_analyzer against a Tandem server and prints TTFT and ITL, which it does not do itself.
#
#   perf/perf_analyzer.sh [-u localhost:8001] [-m llm] [-c 4] [-n 40] [-t 32] [-p FILE] [-o DIR]
#                         [-- options of perf_analyzer]
#
#   -u  host:port of Triton's gRPC          -c  requests at once        -n  requests in all
#   -t  output tokens of each               -p  prompts, one a line     -o  folder of the results
#   -m  model
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
url=localhost:8001 model=llm concurrency=4 requests=40 tokens=32 out= prompts=$here/prompts.txt
while getopts "u:m:c:n:t:p:o:h" option; do
    case $option in
        u) url=$OPTARG ;;
        m) model=$OPTARG ;;
        c) concurrency=$OPTARG ;;
        n) requests=$OPTARG ;;
        t) tokens=$OPTARG ;;
        p) prompts=$OPTARG ;;
        o) out=$OPTARG ;;
        *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; [ "$option" = h ]; exit ;;
    esac
done
shift $((OPTIND - 1))

python=${PYTHON:-$here/../.venv/bin/python}
[ -x "$python" ] || python=python3

# The one on PATH if it runs here: newer ones want a newer glibc than many hosts have.
perf_analyzer=$(command -v perf_analyzer || true)
if [ -z "$perf_analyzer" ] || ! "$perf_analyzer" --version > /dev/null 2>&1; then
    perf_analyzer=$("$python" -m tandem_perf.perf_analyzer_install)
fi

out=${out:-perf_analyzer-$(date +%Y%m%d-%H%M%S)}
mkdir -p "$out"
rm -f "$out/export.json"  # perf_analyzer refuses to overwrite it
"$python" -m tandem_perf.perf_analyzer_input "$prompts" --max-tokens "$tokens" > "$out/input.json"
"$perf_analyzer" -m "$model" -u "$url" -i grpc --async --streaming --input-data "$out/input.json" \
    --concurrency-range "$concurrency" --request-count "$requests" \
    --profile-export-file "$out/export.json" "$@"
"$python" -m tandem_perf.perf_analyzer_export "$out/export.json"
